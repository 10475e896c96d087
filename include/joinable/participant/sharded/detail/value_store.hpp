// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/bucket/memory.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Stands for an engine's parameter of whose value this rank keeps a part. The step sees the part,
/// and everything else is the engine's.
struct PartOfParameter {
    AnyParameter whole;
    /// Has the extents of the whole value and memory for the elements that this rank owns. Empty if
    /// the parameter is not sharded.
    AnyView value = {};
};

}}} // namespace joinable::v0::detail

template <>
struct joinable::parameter_traits<joinable::detail::PartOfParameter> {
    using Part = joinable::detail::PartOfParameter;
    static std::optional<AnyView> value(Part& p) { return p.value ? p.value : p.whole.value(); }
    static std::optional<AnyView> grad(Part& p) {
        AnyView const gradient = p.whole.grad();
        return gradient ? std::optional{gradient} : std::nullopt;
    }
    static bool requires_grad(Part const& p) { return p.whole.requires_grad(); }
    static std::string_view name(Part const& p) { return p.whole.name(); }
    static void release_grad(Part& p) { p.whole.release_grad(); }
    static void set_value(Part& p, AnyView const& view) { p.whole.set_value(view); }
    static void release_value(Part& p) { p.whole.release_value(); }
};

namespace joinable { inline namespace v0 { namespace detail {

/// Checks that the elements of parameter `i` lie in the order in which `given` has them, which the state has, too.
/// @throws ContractViolation
void check_layout(ParameterList const& parameters, std::size_t i, AnyView const& given);

/// Where values lie whose memory the engine does not own.
enum class Residence : std::uint8_t {
    bucket,   ///< all of them: in the buckets in which they travel, so that no step copies them
    own_part, ///< those that this rank owns; stand-ins replace the engine's parameters
};

/// Memory for the values of a group of parameters. Local.
class ValueStore {
public:
    /// Allocates memory. Takes the current extents and order of the values.
    /// @throws ContractViolation  a value cannot be set.
    ValueStore(
        ParameterList const& parameters,
        std::span<OptimizerShard const> shards,
        Residence residence,
        BufferMemory const& memory
    );
    ValueStore(ValueStore const&) = delete;
    ValueStore& operator=(ValueStore const&) = delete;
    /// Releases values in buckets, whose memory ends here.
    ~ValueStore();

    /// Moves the engine's values into the buckets, or copies those that this rank owns; on a
    /// device, complete after its finish().
    /// @throws ContractViolation  set_value copies; or a value is missing, or has its elements in another order: then
    ///         nothing was copied.
    void take(std::span<OptimizerShard const> shards, Scratch& scratch);
    /// After take() was refused on any rank: leaves the values that were set where they are, in
    /// memory that lives as long as this process. The engine may have freed its own.
    void leave() noexcept;
    /// After take() succeeded on all ranks: frees values of which this rank keeps only a part.
    void release() const;
    /// @throws ContractViolation  the engine has moved a value out of its bucket.
    void check() const;

    /// Whether a value of the engine lies here. Forgets those that have left, whose parameters may
    /// end then.
    [[nodiscard]] bool holds_any() {
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            if (is_moved(i)) {
                parts_[i].value = {};
            }
        }
        return std::any_of(parts_.begin(), parts_.end(), [](PartOfParameter const& part) {
            return static_cast<bool>(part.value);
        });
    }

    [[nodiscard]] bool is_sharded() const noexcept { return residence_ == Residence::own_part; }
    /// The engine's parameters.
    [[nodiscard]] ParameterList const& given() const noexcept { return whole_; }
    /// The bucket of a shard, or this rank's part of it.
    [[nodiscard]] std::byte* at(std::size_t shard) const noexcept {
        return memory_.data() + begins_[shard];
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

    /// The parameters. Stand-ins, which live as long as `self`, replace the sharded ones.
    [[nodiscard]] static ParameterList list(std::shared_ptr<ValueStore> const& self);

private:
    void move_to_buckets();
    /// Whether the value of parameter `i` lies in a bucket and the engine has moved it.
    [[nodiscard]] bool is_moved(std::size_t i) const {
        AnyView const& place = parts_[i].value;
        if (is_sharded() || !place) {
            return false;
        }
        AnyView const value = whole_[i].value();
        return !value || value.data() != place.data();
    }

    ParameterList whole_; ///< the engine's
    Residence residence_;
    Device& device_;
    std::vector<PartOfParameter> parts_; ///< no view: of what no rank steps, or has no elements
    Arena memory_;
    std::vector<std::size_t> begins_; ///< of each shard's, in bytes: at cache lines
    bool is_taken_ = false;           ///< the engine's values were set
};

/// Memory for packed buckets and gathered values. The reduction of gradients and the exchange of
/// values take turns with it. Local.
class BucketArenas {
public:
    static constexpr std::size_t none = std::size_t(-1);

    explicit BucketArenas(BufferMemory const& memory) : memory_{memory} {}

    /// Makes the first `count` arenas at least this large. Taking no more than these allocates nothing.
    void reserve(std::size_t count, std::size_t bytes) {
        free_.reserve(count);
        for (std::size_t k = 0; k < count; ++k) {
            static_cast<void>(data(k, bytes));
        }
    }
    /// Arena `k`, of at least `bytes`. It loses its contents when it grows.
    [[nodiscard]] std::byte* data(std::size_t k, std::size_t bytes) {
        if (k >= arenas_.size()) {
            arenas_.resize(k + 1);
        }
        if (bytes > arenas_[k].bytes()) {
            arenas_[k] = memory_.allocate(bytes);
        }
        return arenas_[k].data();
    }
    /// Takes the first arena that is free, for at least `bytes`.
    [[nodiscard]] std::size_t take(std::size_t bytes) {
        if (free_.empty()) {
            free_.reserve(in_use_ + 1); // give_back() must not throw
            free_.push_back(in_use_++);
        }
        auto const first = std::min_element(free_.begin(), free_.end()); // few have memory
        static_cast<void>(data(*first, bytes)); // if this throws, it stays free
        std::size_t const k = *first;
        free_.erase(first);
        return k;
    }
    /// `arena` becomes `none`.
    void give_back(std::size_t& arena) noexcept {
        if (arena != none) {
            free_.push_back(std::exchange(arena, none));
        }
    }
    void give_back_all() noexcept {
        free_.clear();
        in_use_ = 0;
    }
    /// Whether take() needs an arena beyond the first `count`.
    [[nodiscard]] bool are_taken(std::size_t count) const noexcept {
        return free_.empty() && in_use_ >= count;
    }
    [[nodiscard]] bool are_all_free() const noexcept { return free_.size() == in_use_; }
    /// Frees all arenas but the first `count`.
    void keep(std::size_t count) noexcept {
        for (std::size_t k = count; k < arenas_.size(); ++k) {
            arenas_[k] = Arena{};
        }
    }
    [[nodiscard]] std::size_t bytes() const noexcept {
        std::size_t bytes = 0;
        for (Arena const& arena : arenas_) {
            bytes += arena.bytes();
        }
        return bytes;
    }

private:
    BufferMemory memory_;
    std::vector<Arena> arenas_;
    std::size_t in_use_ = 0; ///< including free ones
    std::vector<std::size_t> free_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/impl/value_store.ipp>
#endif
