// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/parameters.hpp>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>

#include <joinable/tensor/tensor_list.hpp>

namespace {

using joinable::parameters;

struct Plain {
    std::vector<float> value;
    std::vector<float> grad;
};
struct Optional {
    std::vector<double> value;
    std::optional<std::vector<double>> grad;
    std::string name;
    bool requires_grad;
};
struct Handle {
    std::shared_ptr<Plain> plain;
};
/// Its & gives something else than its address, as that of xtensor's views.
struct Closure {
    std::vector<float> numbers;
    void operator&() const {} // NOLINT(google-runtime-operator)
};
struct OfClosures {
    Closure value;
    std::optional<Closure> grad;
    void operator&() const {} // NOLINT(google-runtime-operator)
};
struct NoGradient {
    std::vector<float> value;
};
static_assert(joinable::Parameter<Plain> && joinable::Parameter<Optional>);
static_assert(!joinable::Parameter<NoGradient> && !joinable::Parameter<int>);

} // namespace

template <>
struct joinable::tensor_traits<Closure> : joinable::tensor_traits<std::vector<float>> {
    static float* data(Closure& t) { return t.numbers.data(); }
    static auto extents(Closure const& t) { return std::array{t.numbers.size()}; }
};

template <>
struct joinable::parameter_traits<Handle> {
    static constexpr bool is_handle = true;
    static auto* value(Handle& h) { return &h.plain->value; }
    static auto* grad(Handle& h) { return &h.plain->grad; }
};

namespace {

TEST_CASE("ranges of different types are one list, in order") {
    std::vector<Plain> plains(2, Plain{{1.0F}, {2.0F}});
    std::vector<Optional> optionals{{{1.0, 2.0}, {}, "scale", false}};
    auto const list = parameters(plains, optionals, parameters(plains));
    REQUIRE(list.size() == 5);
    CHECK(list[1].value().data() == plains[1].value.data());
    CHECK(list[3].value().data() == plains[0].value.data());
    CHECK(list[2].value().dtype() == joinable::DType::f64);
    CHECK_FALSE(list[2].grad());
    CHECK_FALSE(list[2].requires_grad());
    CHECK(list[0].requires_grad());
    CHECK(list[2].name() == "scale");
    CHECK(list[0].name().empty());
    CHECK_FALSE(list[0].can_set_grad());
    optionals[0].grad.emplace(2);
    CHECK(list[2].grad()); // asked again each time
}

TEST_CASE("parameters and tensors are found where they are, whatever their & gives") {
    OfClosures parameter{{{1.0F}}, Closure{{2.0F}}};
    auto const list = parameters(parameter);
    CHECK(list[0].value().data() == parameter.value.numbers.data());
    CHECK(list[0].grad().data() == parameter.grad->numbers.data());
    joinable::AnyTensor const tensor{parameter.value};
    CHECK(tensor.view().data() == parameter.value.numbers.data());
}

TEST_CASE("pointers are kept, shared ones keep their parameters alive, temporary ranges too") {
    Plain plain{{1.0F}, {0.0F}};
    auto shared = std::make_shared<Plain>(Plain{{5.0F}, {0.0F}});
    auto const list =
        parameters(std::vector{&plain}, std::vector{shared}, std::vector<Handle>{{shared}});
    std::weak_ptr<Plain> const watch = shared;
    shared.reset();
    CHECK(watch.use_count() == 2);
    CHECK(list[0].value().data() == plain.value.data());
    CHECK(list[1].value().as<float>()(0) == 5.0F);
    CHECK(list[2].value().data() == list[1].value().data());
}

TEST_CASE("unique pointers keep their parameters, of a named range as of a temporary view of it") {
    std::vector<std::unique_ptr<Plain>> owners;
    owners.push_back(std::make_unique<Plain>(Plain{{5.0F}, {0.0F}}));
    auto const list = parameters(owners, std::span{owners});
    REQUIRE(owners[0] != nullptr);
    CHECK(list[0].value().data() == owners[0]->value.data());
    CHECK(list[1].value().data() == owners[0]->value.data());
}

TEST_CASE("objects that a temporary view shows are found where they are") {
    std::vector<Plain> all(3, Plain{{1}, {2}});
    auto const list = parameters(std::span{all}.first(1), std::span<Plain>{all}.last(1));
    all[2].value[0] = 5;
    REQUIRE(list.size() == 2);
    CHECK(list[0].value().data() == all[0].value.data());
    CHECK(list[1].value().as<float>()(0) == 5);
}

TEST_CASE("handles that a temporary view shows stay with their owner, and are kept as well") {
    std::vector<Handle> handles{{std::make_shared<Plain>(Plain{{5.0F}, {0.0F}})}};
    auto const list = parameters(std::span{handles});
    REQUIRE(handles[0].plain != nullptr);
    handles.clear();
    CHECK(list[0].value().as<float>()(0) == 5.0F);
}

TEST_CASE("const handles are written through, since their copies share storage") {
    std::vector<Handle> const handles{{std::make_shared<Plain>(Plain{{5.0F}, {0.0F}})}};
    auto const list = parameters(handles);
    list[0].value().as<float>()(0) = 6.0F;
    CHECK(handles[0].plain->value[0] == 6.0F);
}

TEST_CASE("a null pointer is refused by its place") {
    Plain plain{{1.0F}, {0.0F}};
    std::vector<Plain*> const pointers{&plain, nullptr};
    CHECK_THROWS_WITH_AS(
        (void)parameters(pointers), "parameters: pointer 1 is null", joinable::ContractViolation
    );
}

struct OfViews {
    joinable::AnyView value;
    joinable::AnyView grad;
};

TEST_CASE("a value on another device than its communicator's is refused by both devices") {
    joinable::AnyView const far{
        nullptr, joinable::DType::f32, {2}, {1}, {joinable::DeviceKind::cuda, 1}
    };
    std::vector<OfViews> list{{far, far}};
    CHECK_THROWS_WITH_AS(
        joinable::detail::check_value(parameters(list), 0, joinable::DeviceId{}),
        "parameter 0 is on CUDA device 1, but its communicator moves memory of the host; give a communicator of its device, or PerDevice those of all",
        joinable::ContractViolation
    );
}

TEST_CASE("a gradient can be set where the traits allow it") {
    std::vector<joinable_tests::Param<float>> params;
    params.emplace_back(2);
    auto const list = parameters(params);
    std::vector<float> elsewhere{3.0F, 4.0F};
    REQUIRE(list[0].can_set_grad());
    list[0].set_grad(joinable::AnyView{elsewhere});
    CHECK(params[0].g(1) == 4.0F);
    std::vector<Plain> plains(1, Plain{{1.0F}, {2.0F}});
    CHECK_THROWS_AS(
        parameters(plains)[0].set_grad(joinable::AnyView{elsewhere}), joinable::ContractViolation
    );
}

} // namespace
