// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/tensor_list.hpp>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/tensor/strided_view.hpp>

namespace {

using joinable::AnyView;
using joinable::buffers;

/// An engine's tensor: a handle whose copies share storage, and which can be given other storage.
struct StorageHandle {
    std::shared_ptr<std::vector<double>> storage;
};

} // namespace

template <>
struct joinable::tensor_traits<StorageHandle> {
    using value_type = double;
    static double* data(StorageHandle const& h) { return h.storage->data(); }
    static std::array<std::size_t, 1> extents(StorageHandle const& h) {
        return {{h.storage->size()}};
    }
};

namespace {

TEST_CASE("ranges of tensors of different types are one list, in order") {
    std::vector<std::vector<float>> owned(2, std::vector<float>(3));
    std::vector<double> values(6);
    std::array<AnyView, 1> const views{{AnyView{values}}};
    std::int64_t steps = 5;
    auto const list = buffers(
        owned,
        std::vector{joinable::as_strided(values, {2, 3}, {1, 2})},
        views,
        std::vector{std::span{&steps, 1}},
        buffers(owned)
    );
    REQUIRE(list.size() == 7);
    CHECK(list[1].view().data() == owned[1].data());
    CHECK(list[2].view().strides() == joinable::Shape{1, 2});
    CHECK(list[3].view().data() == values.data());
    CHECK(list[4].view().as<std::int64_t>()(0) == 5);
    CHECK(list[5].view().data() == owned[0].data());
}

TEST_CASE("a tensor is taken as a range of one, a view of one may be a temporary") {
    std::vector<float> running_mean(3, 1.0F);
    std::vector<double> steps(2, 5.0);
    auto const list = buffers(running_mean, std::span{steps}, std::vector{&running_mean});
    REQUIRE(list.size() == 3);
    CHECK(list[0].view().data() == running_mean.data());
    CHECK(list[1].view().data() == steps.data());
    CHECK(list[2].view().data() == running_mean.data());
    running_mean = std::vector<float>(3, 2.0F); // it is followed
    CHECK(list[0].view().as<float>()(0) == 2.0F);
}

TEST_CASE("a tensor that gets other memory is followed") {
    std::vector<std::vector<float>> owned{{1.0F}};
    std::vector<StorageHandle> handles{{std::make_shared<std::vector<double>>(1, 1.0)}};
    auto const list = buffers(owned, handles);
    owned[0] = std::vector<float>{2.0F};
    handles[0] = {std::make_shared<std::vector<double>>(1, 2.0)};
    CHECK(list[0].view().as<float>()(0) == 2.0F);
    CHECK(list[1].view().as<double>()(0) == 2.0);
}

TEST_CASE("pointers are kept, shared ones and temporary handles keep their tensors alive") {
    std::vector<float> plain{1.0F};
    auto const unique = std::make_unique<std::vector<float>>(1, 2.0F);
    auto shared = std::make_shared<std::vector<double>>(1, 3.0);
    auto const list = buffers(
        std::vector{&plain},
        std::span{&unique, 1},
        std::vector{shared},
        std::vector<StorageHandle>{{shared}}
    );
    std::weak_ptr<std::vector<double>> const watch = shared;
    shared.reset();
    CHECK(watch.use_count() == 2);
    CHECK(list[0].view().data() == plain.data());
    CHECK(list[1].view().data() == unique->data());
    CHECK(list[2].view().as<double>()(0) == 3.0);
    CHECK(list[3].view().data() == list[2].view().data());
}

TEST_CASE(
    "an optional holds its tensor: a named range is followed, views of a temporary one are copied"
) {
    std::vector<float> plain(3, 1.0F);
    std::array<std::optional<std::vector<float>>, 1> named{{std::vector<float>{2.0F}}};
    auto const list = buffers(
        std::vector<std::optional<std::span<float>>>{std::span{plain}, std::span{plain}.last(1)},
        named
    );
    REQUIRE(list.size() == 3);
    CHECK(list[0].view().data() == plain.data());
    CHECK(list[1].view().data() == &plain[2]);
    named[0]->assign(5, 4.0F);
    CHECK(list[2].view().data() == named[0]->data());
    CHECK(list[2].view().numel() == 5);
    CHECK_FALSE(buffers(std::vector<std::optional<std::span<float>>>(1))[0].view());
}

TEST_CASE("a tensor that is missing, on a device or of another size is refused by its index") {
    std::vector<float> plain(2);
    std::vector<std::vector<float>*> const pointers{&plain, nullptr};
    CHECK_THROWS_WITH_AS(
        joinable::detail::FixedTensors(buffers(pointers), "buffer"),
        "buffer 1 is missing; give a pointer that is not null",
        joinable::ContractViolation
    );
    std::vector<AnyView> const on_device{
        AnyView{nullptr, joinable::DType::f32, {2}, {1}, {joinable::DeviceKind::cuda, 0}}
    };
    CHECK_THROWS_WITH_AS(
        joinable::detail::FixedTensors(buffers(on_device), "buffer"),
        "buffer 0 is not on the host; give a copy that is",
        joinable::ContractViolation
    );
    std::vector<std::vector<float>> owned(2, std::vector<float>(3));
    joinable::detail::FixedTensors tensors{buffers(owned), "state tensor"};
    owned[1] = std::vector<float>(3);
    CHECK(tensors.views()[1].data() == owned[1].data());
    owned[1].resize(4);
    CHECK_THROWS_WITH_AS(
        tensors.views(),
        "state tensor 1 was f32 (3), but now is f32 (4); it may move, but neither grow nor change",
        joinable::ContractViolation
    );
}

} // namespace
