// SPDX-License-Identifier: BSL-1.0
// Models whose parameters become trainable or frozen, or are added, between guards: trainings equal a serial one in double
// that does the same at the same step, and a refused refresh leaves the model as it was.
#include <joinable/refresh.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/ended_param.hpp>
#include <support/failure_text.hpp>
#include <support/linear_model.hpp>

#include <joinable/bucket/all_reduce.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::Mismatch;
using joinable::participants;
using joinable::PeerFailed;
using joinable::Round;
using joinable::Step;

constexpr double learning_rate = 0.125;
constexpr double momentum = 0.5;

/// The gradient of an element in a step of a rank.
double gradient_of(int rank, std::size_t step, std::string_view name, std::size_t element) {
    return static_cast<double>(rank + 1) * static_cast<double>(step % 5 + 1) / 4 +
           static_cast<double>(name.front() - 'a') + static_cast<double>(element) / 8;
}
double start_of(int rank, std::string_view name, std::size_t element) {
    return static_cast<double>(rank) + static_cast<double>(name.back() - 'a') / 2 +
           static_cast<double>(element);
}
/// How many inputs a rank has: 2, 4, 3, 2, ...
std::size_t inputs_of(int rank) {
    return 2 + static_cast<std::size_t>(2 * rank % 3);
}

struct Numbers {
    std::vector<double> values;
    std::vector<double> velocity;
    bool is_trained = true;

    void step(std::vector<double> const& gradient) {
        for (std::size_t e = 0; e < values.size(); ++e) {
            velocity[e] = momentum * velocity[e] + gradient[e];
            values[e] -= learning_rate * velocity[e];
        }
    }
};
std::vector<double> start_values(int rank, std::string_view name, std::size_t size) {
    std::vector<double> values;
    for (std::size_t e = 0; e < size; ++e) {
        values.push_back(start_of(rank, name, e));
    }
    return values;
}

/// The oracle: all batches in one process. An average divides by all ranks, those that joined give zeros.
struct SerialTraining {
    int world;
    std::map<std::string, Numbers> parameters = {};
    std::size_t steps = 0;

    void add(std::string const& name, std::size_t size, bool is_trained) {
        parameters[name] = {start_values(0, name, size), std::vector<double>(size), is_trained};
    }
    void epoch() {
        for (std::size_t input = 0; input < 4; ++input, ++steps) {
            bool is_any_active = false;
            for (int rank = 0; rank < world; ++rank) {
                is_any_active = is_any_active || input < inputs_of(rank);
            }
            for (auto& [name, numbers] : parameters) {
                std::vector<double> average(numbers.values.size());
                for (int rank = 0; rank < world && numbers.is_trained; ++rank) {
                    for (std::size_t e = 0; input < inputs_of(rank) && e < average.size(); ++e) {
                        average[e] += gradient_of(rank, steps, name, e) / world;
                    }
                }
                if (numbers.is_trained && is_any_active) {
                    numbers.step(average);
                }
            }
        }
    }
};

/// A rank's model, whose parameters stay where they are when others come.
struct RankModel {
    int rank;
    std::deque<Param<double>> parameters = {};
    std::map<std::string, Numbers> optimizer = {};
    std::vector<Param<double>*> listed = {}; ///< in the order of the list
    std::size_t steps = 0;

    void add(std::string const& name, std::size_t size, bool is_trained, bool in_front = false) {
        Param<double>& added = parameters.emplace_back(size);
        added.value = start_values(rank, name, size);
        added.name = name;
        added.requires_grad = is_trained;
        listed.insert(in_front ? listed.begin() : listed.end(), &added);
        optimizer[name] = {{}, std::vector<double>(size), true};
    }
    Param<double>& at(std::string const& name) {
        for (Param<double>* param : listed) {
            if (param->name == name) {
                return *param;
            }
        }
        throw std::logic_error{"no such parameter"};
    }
    void zero_gradients() {
        for (Param<double>* param : listed) {
            for (std::size_t e = 0; param->grad && e < param->value.size(); ++e) {
                param->g(e) = 0;
            }
        }
    }
    void step() {
        for (Param<double>* param : listed) {
            if (param->requires_grad) {
                std::vector<double> gradient;
                for (std::size_t e = 0; e < param->value.size(); ++e) {
                    gradient.push_back(param->g(e));
                }
                Numbers& numbers = optimizer[param->name];
                numbers.values.swap(param->value);
                numbers.step(gradient);
                numbers.values.swap(param->value);
            }
        }
        ++steps;
    }
    template <class Ddp>
    void pass(Ddp& ddp, joinable::RoundNotice const& notice = {}) {
        ddp.forward([] {}, notice);
        ddp.backward([&](auto ready) {
            for (std::size_t i = listed.size(); i-- > 0;) {
                Param<double>& param = *listed[i];
                if (param.requires_grad) {
                    for (std::size_t e = 0; e < param.value.size(); ++e) {
                        param.g(e) += gradient_of(rank, steps, param.name, e);
                    }
                    ready(i);
                }
            }
        });
    }
    template <class Ddp>
    void epoch(Ddp& ddp) {
        Step optimizer_step{ddp.join_communicator(), [&](Round const&) {
                                step();
                                zero_gradients();
                            }};
        std::size_t const begin = steps;
        Join guard{participants(ddp, optimizer_step)};
        zero_gradients();
        for (std::size_t input = 0; input < inputs_of(rank); ++input) {
            pass(ddp);
            optimizer_step.step();
        }
        guard.finish();
        steps = begin + 4;
    }
};

void check_equal(RankModel& model, SerialTraining const& serial) {
    for (auto const& one : serial.parameters) {
        CAPTURE(one.first);
        auto const& numbers = one.second;
        Param<double> const& param = model.at(one.first);
        for (std::size_t e = 0; e < numbers.values.size(); ++e) {
            CHECK(param.value[e] == doctest::Approx(numbers.values[e]).epsilon(1e-12));
        }
    }
}

TEST_CASE("a model that freezes, unfreezes and adds between guards trains as a serial one") {
    std::vector<DataParallelOptions> const all{
        {},
        {.gradient_as_bucket_view = true},
        {.find_unused = true},
        {.gradient_as_bucket_view = true, .static_graph = true},
        {.bucket_cap_bytes = 16, .first_bucket_bytes = 16, .verify_replicas = 2}
    };
    for (std::size_t k = 0; k < all.size(); ++k) {
        CAPTURE(k);
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            SerialTraining serial{comm.size()};
            RankModel model{comm.rank()};
            for (auto const& [name, size, is_trained] :
                 {std::tuple{"alpha", 3, false}, {"body", 5, true}, {"crown", 2, true}}) {
                serial.add(name, static_cast<std::size_t>(size), is_trained);
                model.add(name, static_cast<std::size_t>(size), is_trained);
            }
            DistributedDataParallel ddp{comm, model.listed, all[k]};
            auto const epoch = [&] {
                model.epoch(ddp);
                serial.epoch();
                check_equal(model, serial);
            };
            auto const set_trained = [&](std::string const& name, bool is_trained) {
                model.at(name).requires_grad = serial.parameters[name].is_trained = is_trained;
            };
            epoch();
            set_trained("alpha", true);
            set_trained("crown", false);
            if (comm.rank() != 0) { // as of a layer that each rank has made anew
                model.at("alpha").value.assign(3, -1.0);
            }
            ddp.refresh();
            epoch();
            set_trained("body", false);
            set_trained("crown", true); // its momentum is the optimizer's
            serial.add("door", 4, true);
            model.add("door", 4, true, true); // so that all indices change
            ddp.refresh(model.listed);
            epoch();
            epoch();
            CHECK(ddp.divisor() == comm.size());
        });
    }
}

TEST_CASE("values of newly trained and added parameters are sent, and those of others are not") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (bool const sends : {true, false}) {
            RankModel model{comm.rank()};
            model.add("alpha", 1, false);
            model.add("body", 1, true);
            model.add("crown", 1, false);
            std::vector<double> buffer{1.0 * comm.rank()};
            std::vector<double> state{1.0 * comm.rank()};
            DistributedDataParallel ddp{
                comm, model.listed, joinable::buffers(buffer), {.sync_at_start = sends}
            };
            ddp.attach_state(state);
            double const own = comm.rank() + 7;
            for (Param<double>* param : model.listed) {
                param->value[0] = own;
            }
            buffer[0] = state[0] = own;
            model.at("alpha").requires_grad = true;
            model.add("door", 1, false, true);
            model.at("door").value[0] = own;
            ddp.refresh(model.listed);
            double const sent = sends ? 7 : own;
            CHECK(model.at("alpha").value[0] == sent);
            CHECK(model.at("door").value[0] == sent);
            CHECK(model.at("body").value[0] == own);
            CHECK(model.at("crown").value[0] == own);
            CHECK(buffer[0] == own);
            CHECK(state[0] == own);
            std::vector<double> more{own};
            ddp.refresh(model.listed, joinable::buffers(buffer, more));
            CHECK(buffer[0] == sent);
            CHECK(more[0] == sent);
            CHECK(state[0] == own);
            Join guard{participants(ddp)};
            model.pass(ddp);
            guard.finish();
            CHECK(state[0] == comm.size() - 1 + 7); // is sent where a guard ends
            CHECK(more[0] == 7);
        }
    });
}

TEST_CASE("a parameter is known by its name, and without one by where its value is") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const has_names : {true, false}) {
            std::deque<Param<double>> params;
            std::vector<Param<double>*> listed;
            auto const add = [&](std::string const& name, double value) {
                params.emplace_back(2, value);
                params.back().name = has_names ? name : "";
                listed.insert(listed.begin(), &params.back());
            };
            add("same", 1);
            add("same", 2); // in the order of the list, if names do not differ
            add("other", 3);
            DistributedDataParallel ddp{comm, listed};
            for (Param<double>& param : params) {
                param.value[0] = 10.0 * comm.rank();
            }
            add("last", 4);
            ddp.refresh(listed);
            for (std::size_t k = 0; k < 3; ++k) { // which were trained: nothing was sent
                CHECK(params[k].value[0] == 10.0 * comm.rank());
            }
            params.back().value[0] = 10.0 * comm.rank();
            std::vector<double> const moved = params[0].value;
            params[0].value = std::vector<double>(4, 5.0 + comm.rank()); // of other extents
            params[0].storage.resize(4);
            params[0].grad = joinable::AnyView{params[0].storage};
            ddp.refresh();
            CHECK(params[0].value[3] == 5.0);
            CHECK(params.back().value[0] == 10.0 * comm.rank());
        }
    });
}

TEST_CASE("a parameter whose value lies where another one's was takes rank 0's values") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const has_names : {true, false}) {
            Param<double> first{2, 1.0};
            Param<double> second{2};
            first.name = second.name = has_names ? "body" : "";
            DistributedDataParallel ddp{comm, std::vector{&first}};
            second.value.swap(first.value); // the first one has other memory now
            std::fill(second.value.begin(), second.value.end(), comm.rank() + 5.0);
            ddp.refresh(has_names ? std::vector{&second} : std::vector{&first, &second});
            CHECK(second.value == std::vector<double>(2, 5.0));
        }
    });
}

TEST_CASE("a layer that replaces one of the same name takes rank 0's values") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (bool const is_trained : {true, false}) {
            std::deque<Param<double>> params;
            std::vector<std::vector<Param<double>*>> lists;
            for (int k = 0; k < 2; ++k) {
                lists.emplace_back();
                for (char const* const name : {"body", "head"}) {
                    bool const is_new = k == 1 && name[0] == 'h';
                    if (k == 0 || is_new) {
                        params.emplace_back(2, 1.0 + comm.rank() + k);
                        params.back().name = name;
                        params.back().requires_grad = is_trained || name[0] == 'b';
                    }
                    lists.back().push_back(k == 0 || is_new ? &params.back() : lists[0][0]);
                }
            }
            DistributedDataParallel ddp{comm, lists[0]};
            params[0].value[0] = 10.0 + comm.rank(); // was trained: it is not sent
            ddp.refresh(lists[1]);
            CHECK(params[0].value[0] == 10.0 + comm.rank());
            CHECK(params[2].value[0] == 2.0);
        }
    });
}

TEST_CASE("a frozen gradient stays readable in its bucket until it is trained again") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        RankModel model{comm.rank()};
        model.add("alpha", 3, true);
        model.add("body", 2, true);
        DistributedDataParallel ddp{comm, model.listed, {.gradient_as_bucket_view = true}};
        model.pass(ddp);
        double const average = model.at("alpha").g(0);
        double const sum = (comm.size() + 1) / 8.0; // of ranks' (r + 1) / 4, over all ranks
        CHECK(average == doctest::Approx(sum));
        model.at("alpha").requires_grad = false;
        ddp.refresh();
        ddp.refresh();
        CHECK(model.at("alpha").g(0) == average);
        CHECK(model.at("alpha").g(2) == doctest::Approx(average + 0.25));
        model.at("alpha").requires_grad = true;
        ddp.refresh();
        CHECK(model.at("alpha").g(0) == average);
        model.zero_gradients();
        model.pass(ddp);
        CHECK(model.at("alpha").g(0) == doctest::Approx(sum));
    });
}

TEST_CASE("a parameter that is left out, and has no gradient in a bucket, is not read any more") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        for (bool const are_views : {true, false}) {
            EndedParam body{2, 1.0};
            EndedParam head{3, 1.0};
            EndedParam tail{1, 1.0};
            body.grad = head.grad = {};
            {
                DistributedDataParallel ddp{
                    comm,
                    std::vector{&body, &head},
                    {.gradient_as_bucket_view = are_views, .find_unused = true}
                };
                ddp.forward([] {});
                auto const pass = [&](auto ready) {
                    add_gradient(body, comm.rank() + 1.0);
                    ready(0);
                };
                ddp.backward(pass, std::vector<std::size_t>{1}); // no rank uses the head
                double const average = (comm.size() + 1) / 2.0;
                CHECK(
                    body.g(1) == doctest::Approx(average).epsilon(1e-12)
                ); // machines divide apart
                CHECK(!head.grad);
                body.requires_grad = false;
                ddp.refresh(std::vector{&body, &tail});
                head.has_ended = true;
                ddp.refresh();
                CHECK(head.reads_after_end == 0);
                CHECK(
                    body.g(1) == doctest::Approx(average).epsilon(1e-12)
                ); // machines divide apart
            }
            CHECK(head.reads_after_end == 0);
            CHECK((!body.grad || !are_views)); // its bucket has ended
        }
    });
}

TEST_CASE("a recorded order and a static graph are forgotten") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (bool const is_static : {false, true}) {
            RankModel model{comm.rank()};
            model.add("alpha", 3, true);
            model.add("body", 2, false);
            model.add("crown", 2, true);
            DistributedDataParallel ddp{comm, model.listed, {.static_graph = is_static}};
            model.pass(ddp);
            CHECK(!ddp.is_rebuild_due());
            model.at("alpha").requires_grad = false;
            model.at("body").requires_grad = true;
            ddp.refresh();
            CHECK(ddp.is_rebuild_due());
            model.zero_gradients();
            model.pass(ddp);
            CHECK(!ddp.is_rebuild_due());
            model.zero_gradients();
            model.pass(ddp);
            CHECK(ddp.buckets().size() == 1);
            CHECK(ddp.buckets()[0].parameters == std::vector<std::size_t>{2, 1});
        }
    });
}

TEST_CASE("refresh() outside of where it belongs is refused in a sentence") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        RankModel model{comm.rank()};
        model.add("alpha", 3, true);
        DistributedDataParallel ddp{comm, model.listed};
        std::string const inside =
            "contract: refresh() was called in a guard or in a round; call it before, on every rank";
        {
            Join guard{participants(ddp)};
            CHECK(failure_of([&] { ddp.refresh(); }) == inside);
            model.pass(ddp);
            CHECK(failure_of([&] { ddp.refresh(model.listed); }) == inside);
            guard.finish();
        }
        ddp.forward([] {});
        CHECK(failure_of([&] { ddp.refresh(); }) == inside);
        ddp.backward([](auto ready) { ready(0); });
        ddp.refresh();
    });
}

TEST_CASE("an open window is refused on all ranks, unless the gradients were cleared") {
    over_ranks({1, 2, 3, 8}, [](RankCommunicator& comm) {
        for (bool const on_all : {true, false}) {
            RankModel model{comm.rank()};
            model.add("alpha", 3, true);
            DistributedDataParallel ddp{comm, model.listed};
            bool const holds = on_all || comm.rank() == 0;
            if (holds) {
                model.pass(ddp, {.will_sync = false});
            }
            auto const refresh = [&] { ddp.refresh(); };
            std::string const text = failure_of(refresh);
            CHECK(text.starts_with(holds ? "contract: refresh()" : "peer: rank 0"));
            says(
                text,
                "refresh() was called while gradients hold batches that no round has reduced; call it after a round "
                "that syncs, clear the gradients, or call discard_window() before"
            );
            if (on_all) { // the window is as it was
                model.pass(ddp);
                CHECK(model.at("alpha").g(0) == doctest::Approx(2 * (comm.size() + 1) / 8.0));
                model.zero_gradients();
                model.pass(ddp, {.will_sync = false});
                model.zero_gradients();
                CHECK(failure_of(refresh) == "");
                model.pass(ddp);
                CHECK(model.at("alpha").g(0) == doctest::Approx((comm.size() + 1) / 8.0));
                model.pass(ddp, {.will_sync = false});
            }
            ddp.discard_window();
            CHECK(failure_of(refresh) == "");
        }
    });
}

TEST_CASE("ranks that list different models say so, and the model is as it was before") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        SerialTraining serial{comm.size()};
        RankModel model{comm.rank()};
        for (char const* const name : {"alpha", "body"}) {
            serial.add(name, 3, true);
            model.add(name, 3, true);
        }
        DistributedDataParallel ddp{comm, model.listed, {.gradient_as_bucket_view = true}};
        model.epoch(ddp);
        serial.epoch();
        bool const is_last = comm.rank() == comm.size() - 1;
        model.at("alpha").requires_grad = !is_last;
        std::string text = failure_of([&] { ddp.refresh(); });
        CHECK(text.starts_with(
            "mismatch: models differ: parameter 0 (alpha): rank 0 has f64 (3), rank "
        ));
        model.at("alpha").requires_grad = true;

        text = failure_of([&] {
            ddp.refresh(
                is_last ? std::vector<Param<double>*>{} : std::vector<Param<double>*>{model.listed}
            );
        });
        CAPTURE(text);
        says(text, is_last ? "contract: " : "peer: rank");

        text = failure_of([&] {
            std::vector<double> state(1);
            is_last ? ddp.attach_state(state) : ddp.refresh();
        });
        CAPTURE(text);
        CHECK(text.starts_with("mismatch: "));

        if (is_last) { // of another object in its place, which the other ranks have trained
            model.parameters[1].name = "bode";
        }
        text = failure_of([&] { ddp.refresh(model.listed); });
        CAPTURE(text);
        CHECK(text.starts_with("mismatch: "));
        model.parameters[1].name = "body";

        model.epoch(ddp);
        serial.epoch();
        check_equal(model, serial);
    });
}

TEST_CASE("ranks that know the same list from different ones say so") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::deque<Param<double>> params;
        params.emplace_back(2);
        params.emplace_back(2);
        params.emplace_back(2);
        DistributedDataParallel ddp{comm, std::vector{&params[0], &params[1]}};
        bool const is_last = comm.rank() == comm.size() - 1;
        std::string const text = failure_of([&] {
            ddp.refresh(std::vector{&params[0], is_last ? &params[2] : &params[1]});
        });
        CAPTURE(text);
        says(text, "what a model before had differs: parameter 1: ");
    });
}

TEST_CASE("what a rank's engine throws is heard by the others, and the model is as it was before") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        SerialTraining serial{comm.size()};
        RankModel model{comm.rank()};
        serial.add("alpha", 3, true);
        model.add("alpha", 3, true);
        DistributedDataParallel ddp{comm, model.listed};
        std::vector<Param<double>*> list = model.listed;
        bool const is_last = comm.rank() == comm.size() - 1;
        if (is_last) {
            list.push_back(nullptr);
        }
        std::string const text = failure_of([&] { ddp.refresh(list); });
        CAPTURE(text);
        CHECK(text.starts_with(is_last ? "contract: " : "peer: rank"));
        says(text, "pointer 1 is null");
        model.epoch(ddp);
        serial.epoch();
        check_equal(model, serial);
    });
}

TEST_CASE("refresh() on one rank alone ends at what the others do") {
    if (!compares_collectives) {
        return;
    }
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        RankModel model{comm.rank()};
        model.add("alpha", 300, true);
        DistributedDataParallel ddp{comm, model.listed};
        std::string const text =
            failure_of([&] { comm.rank() == 0 ? ddp.refresh() : model.pass(ddp); });
        CAPTURE(text);
        CHECK((text.starts_with("mismatch: ") || text.starts_with("peer: ")));
    });
}

} // namespace
