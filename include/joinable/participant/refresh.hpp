// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/detail/kept_state.hpp>
#include <joinable/participant/detail/relisted.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor_list.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Makes the model anew from a list of its parameters and then moves what it keeps of them.
template <class Comm, class Reduction, class Times>
struct Refresh<DistributedDataParallel<Comm, Reduction, Times>> {
    using Model = DistributedDataParallel<Comm, Reduction, Times>;

    static void run(Model& model) {
        model.require_outside("refresh()");
        ParameterList const list = model.listed_->parameters();
        relist(model, [&] { return list; }, model.module_->buffers(), {.same_objects = true});
    }
    template <class Parameters>
    static void run(Model& model, Parameters&& parameters) {
        model.require_outside("refresh()");
        auto const list = [&] {
            return joinable::parameters(std::forward<Parameters>(parameters));
        };
        relist(model, list, model.module_->buffers(), {});
    }
    template <class Parameters>
    static void run(Model& model, Parameters&& parameters, BufferList buffers) {
        model.require_outside("refresh()");
        auto const list = [&] {
            return joinable::parameters(std::forward<Parameters>(parameters));
        };
        relist(model, list, std::move(buffers), {.sends_buffers = true});
    }
    /// Explains arguments that are none of these.
    template <class Parameters, class Other, class... Rest>
        requires(!std::is_same_v<std::remove_cvref_t<Other>, BufferList> || sizeof...(Rest) != 0)
    static void run(Model&, Parameters&&, Other const&, Rest const&...) {
        static_assert(
            sizeof...(Rest) > 99,
            "refresh: it takes nothing, the parameters, or the parameters and buffers(ranges...); options are those "
            "of the constructor"
        );
    }

    struct How {
        bool same_objects = false;
        bool sends_buffers = false;
        /// Whether a parameter of before has got another value, perhaps at the same address.
        std::function<bool(std::size_t)> is_replaced = {};
        std::function<void()> accept = {
        }; ///< all ranks have accepted the list; the gradients are where they were
    };
    /// `list_parameters` may throw; the other ranks learn of it.
    static void relist(
        Model& model,
        std::function<ParameterList()> const& list_parameters,
        BufferList buffers,
        How how
    ) {
        auto former = std::exchange(model.model(), {});
        auto& reducer = *former.reducer_;
        Relisted relisted;
        std::optional<KeptState<Reduction>> kept;
        bool is_accepted = false;
        typename Model::Relisting const again{
            reducer.shared_reduction(),
            reducer.shared_timeline(),
            [&](ParameterList const& list, AgreementList& compared) {
                require_no_window(model.window(), [&] {
                    return are_cleared(list, device_of(model.comm_));
                });
                relisted = Relisted{*former.listed_, list, how.same_objects, how.is_replaced};
                relisted.agree_on(compared, list);
                model.module_->take_over(*former.module_, compared);
                model.former_.reserve(model.former_.size() + 1);
                kept.emplace(reducer.reduction(), device_of(model.comm_));
            },
            [&](std::size_t i) {
                return i == relisted.size() ? !how.sends_buffers : relisted.is_equal(i);
            },
            [&] {
                is_accepted = true;
                model.former_.push_back(std::move(former.reducer_));
                model.forget_window(false);
                if (how.accept) {
                    how.accept();
                }
                kept->write(reducer.reduction(), [&](std::size_t i) { return relisted.was(i); });
            }
        };
        DataParallelOptions const options = former.module_->options();
        try {
            model.list_model(list_parameters, std::move(buffers), options, again);
        } catch (...) {
            if (!is_accepted) {
                model.model() = std::move(former);
                if (kept) {
                    reducer.prepare_reduction();
                    kept->write(reducer.reduction(), [](std::size_t i) { return i; });
                }
            }
            throw;
        }
        std::erase_if(model.former_, [](auto const& one) { return !one->holds_gradients(); });
    }
};

}}} // namespace joinable::v0::detail
