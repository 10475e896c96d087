// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The element that changes no result of a reduction.
template <Element T>
[[nodiscard]] constexpr T neutral_element(ReduceOp op) noexcept {
    if constexpr (complex_number<T>) { // has no order
        return op == ReduceOp::product ? T{{1, 0}} : T{};
    } else {
        using Number =
            std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;
        using Limits = std::numeric_limits<Number>;
        switch (op) {
        case ReduceOp::product: return T{Number{1}};
        case ReduceOp::min: return T{Limits::has_infinity ? Limits::infinity() : (Limits::max)()};
        case ReduceOp::max: return T{Limits::has_infinity ? -Limits::infinity() : Limits::lowest()};
        case ReduceOp::bit_and:
            if constexpr (std::is_integral_v<T>) {
                return static_cast<T>(-1); // true, if it is a boolean
            }
            break;
        case ReduceOp::sum:
        case ReduceOp::bit_or: break;
        }
        return T{};
    }
}

/// The collectives that a joined rank runs in place of a model, with elements that change no result.
/// Their memory is kept: freeing memory of a device would wait for the device without a deadline.
template <Communicator Comm>
class ReplayedCollectives {
public:
    /// Refers to `comm`, which is destroyed first.
    explicit ReplayedCollectives(Comm& comm) noexcept : comm_{comm} {}
    ReplayedCollectives(ReplayedCollectives const&) = delete;
    ReplayedCollectives& operator=(ReplayedCollectives const&) = delete;

    /// Starts a collective. Several may be under way.
    void all_reduce(std::size_t count, DType dtype, ReduceOp op) {
        Place& place = take(count * size_of(dtype));
        Buffer const buffer{place.memory.data(), count, dtype};
        fill(place, buffer, op);
        static_cast<void>(place.work.emplace(comm_.all_reduce(buffer, op)));
    }
    void broadcast(std::size_t count, DType dtype, int root) {
        Place& place = take(count * size_of(dtype));
        Buffer const buffer{place.memory.data(), count, dtype};
        static_cast<void>(place.work.emplace(comm_.broadcast(buffer, root)));
    }

    /// Waits for all collectives under way.
    void wait() {
        for (auto const& place : places_) {
            if (place->work) {
                place->work->wait();
                place->work.reset();
            }
        }
    }
    /// Destroys the works of collectives under way, as their own destructors do.
    void drop() noexcept {
        for (auto const& place : places_) {
            place->work.reset();
        }
    }

private:
    struct Place {
        Arena elements; ///< on the host, to copy from; empty if that is not needed
        Arena memory;
        std::optional<work_of<Comm>> work; ///< of the collective that uses the place
    };

    /// The smallest free place of so many bytes, or a new one. A device may still work with a place
    /// that is free: it works in the order of its stream.
    [[nodiscard]] Place& take(std::size_t bytes) {
        for (auto const& place : places_) { // the oldest first
            if (place->work) {
                if (!place->work->test()) {
                    break;
                }
                place->work.reset();
            }
        }
        auto best = places_.end();
        for (auto place = places_.begin(); place != places_.end(); ++place) {
            if (!(*place)->work && (*place)->memory.bytes() >= bytes &&
                (best == places_.end() || (*place)->memory.bytes() < (*best)->memory.bytes())) {
                best = place;
            }
        }
        if (best != places_.end()) {
            std::rotate(best, best + 1, places_.end());
        } else {
            auto made = std::make_unique<Place>();
            std::size_t const room = std::bit_ceil((std::max)(bytes, Arena::default_alignment));
            made->memory = device_of(comm_).allocate(room, Arena::default_alignment);
            places_.push_back(std::move(made));
        }
        return *places_.back();
    }

    void fill(Place& place, Buffer buffer, ReduceOp op) {
        Device& device = device_of(comm_);
        std::size_t const bytes = buffer.bytes();
        if (bytes == 0) {
            return;
        }
        if (op == ReduceOp::sum || op == ReduceOp::bit_or) {
            device.fill_zero({buffer.data, DType::u8, {bytes}, {1}, device.id()});
        } else {
            if (place.elements.bytes() < bytes) { // once, for the whole place
                place.elements = device.allocate_staging(place.memory.bytes());
            }
            std::byte* const elements = place.elements.data();
            visit_dtype(buffer.dtype, [&]<class T>(std::type_identity<T>) {
                T const element = neutral_element<T>(op);
                for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
                    std::memcpy(elements + at, &element, sizeof(T));
                }
            });
            device.upload(elements, buffer.data, bytes);
        }
        device.submit();
    }

    Comm& comm_;
    std::vector<std::unique_ptr<Place>> places_; ///< in the order in which they were taken
};

}}} // namespace joinable::v0::detail
