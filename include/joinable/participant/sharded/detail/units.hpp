// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/memory.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/sharded/detail/exchange.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/detail/value_store.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Gathers sharded values, one unit of parameters at a time, and releases them after the pass has
/// used them. Every rank runs these collectives in a pass: an all-gather of each unit, once, from
/// the first unit to the last in a forward pass and in reverse order in a backward pass. In a
/// backward pass they alternate with the reductions of gradients: the reductions of a unit follow
/// the gather of the unit that the pass needs next and precede the gather of the unit after that. A
/// unit that is held from one pass to the next is gathered nevertheless, because joined ranks do
/// not know that it is held.
template <Communicator Comm>
class ShardedUnits {
public:
    /// Keeps the values of a unit in place during its lifetime.
    class [[nodiscard("the object that use() returns keeps the values")]] Held {
    public:
        Held() = default;
        Held(Held&& other) noexcept : units_{std::move(other.units_)}, unit_{other.unit_} {}
        Held& operator=(Held&& other) noexcept { // not by value: clang 14 forgets to destroy it
            auto const taken = std::move(other.units_);
            release();
            units_ = taken;
            unit_ = other.unit_;
            return *this;
        }
        ~Held() { release(); }

        /// Stops keeping the values.
        void release() noexcept {
            if (auto const units = std::exchange(units_, nullptr); units && *units) {
                (*units)->release(unit_);
            }
        }

    private:
        friend ShardedUnits;
        Held(std::shared_ptr<ShardedUnits*> units, std::size_t unit) noexcept
            : units_{std::move(units)}, unit_{unit} {}

        std::shared_ptr<ShardedUnits*> units_; ///< points to null after their destruction
        std::size_t unit_ = 0;
    };

    /// Local. `groups` is the list that the participant keeps, `next` the group that it is about to
    /// add.
    ShardedUnits(Comm& comm, std::vector<ShardGroup> const& groups, ShardGroup const& next)
        : comm_{comm}, device_{device_of(comm)}, groups_{groups},
          self_{std::make_shared<ShardedUnits*>(this)}, arenas_{BufferMemory{comm}} {
        for (std::size_t k = 0; k <= groups.size(); ++k) {
            list(k, k == groups.size() ? next : groups[k]);
        }
        arenas_.reserve((std::min)(units_.size(), overlapping), largest_);
    }
    ShardedUnits(ShardedUnits const&) = delete;
    ShardedUnits& operator=(ShardedUnits const&) = delete;
    ~ShardedUnits() { // values in this memory are released
        reset();
        *self_ = nullptr;
    }

    // A pass.

    void begin_forward() {
        require(
            Pass::none,
            "the previous forward pass had no backward pass; announce such a round with {.phase = "
            "Phase::evaluate}, and call skip() after a pass that failed"
        );
        require_released();
        begin(Pass::forward, false);
    }
    /// Ends the forward pass. Units that it did not use are gathered nevertheless; if no pass has
    /// begun, all of them.
    void finish_forward() {
        if (pass_ == Pass::none) {
            begin_forward();
        }
        if (pass_ == Pass::forward) {
            finish();
            pass_ = Pass::between;
        }
    }
    /// `reduces`: gradients are reduced during the pass.
    void begin_backward(bool reduces) {
        finish_forward();
        require(Pass::between, "a backward pass begins in another one");
        begin(Pass::backward, reduces);
    }
    /// Runs the remaining passes of a round. A training round has both, an evaluation only a
    /// forward pass.
    /// @throws ContractViolation  values are still held.
    void finish_passes(bool trains) {
        finish_forward();
        if (trains && pass_ == Pass::between) {
            begin_backward(false);
        }
        if (pass_ == Pass::backward) {
            finish();
        }
        require_released();
        pass_ = Pass::none;
    }
    /// @throws ContractViolation  values are held.
    void require_released() const {
        for (std::size_t k = 0; k < units_.size(); ++k) {
            if (units_[k].holders != 0) {
                throw ContractViolation{concat(
                    "what use() or use_all() returned for ",
                    describe(k),
                    " is still held; let go of it before the last pass of its round returns, before skip(), and "
                    "before the next round begins: a step changes values"
                )};
            }
        }
    }
    /// Discards the state of a pass after a failure.
    void reset() noexcept {
        for (Unit& unit : units_) {
            for (std::optional<Work>& work : unit.works) {
                work.reset();
            }
            arenas_.give_back(unit.landing);
            drop(unit);
        }
        pass_ = Pass::none;
        current_ = nowhere;
    }

    // The turns of gathers and reductions.

    /// Starts the next gather if it is its turn and the pass has used the previous unit. Returns
    /// whether it did.
    bool prefetch() { return is_open() && launched_ == arrived_ && launch(); }
    /// Waits for the next unit without setting its values. Returns false if no unit is left, or
    /// gradients must be reduced first.
    bool pass_by() { return is_open() && arrive(nowhere); }
    /// Whether all gradients of the next unit may be reduced now.
    [[nodiscard]] bool may_reduce() const noexcept {
        return launched_ >= (std::min)(reduced_ + 2, units_.size());
    }
    /// Whether the backward pass has gathered a unit, so that no rank reads this rank's part of it
    /// any more.
    [[nodiscard]] bool is_gathered(std::size_t unit) const noexcept {
        return pass_ != Pass::backward || position_of(unit) < arrived_;
    }
    /// Records that the gradients of a unit are in flight.
    void note_reduced() noexcept { ++reduced_; }

    // Values.

    /// Whether parameter `i` is in a unit.
    [[nodiscard]] bool has(std::size_t i) const noexcept { return unit_of(i) != nowhere; }
    [[nodiscard]] std::size_t unit_of(std::size_t i) const noexcept {
        return i < unit_of_.size() ? unit_of_[i] : nowhere;
    }
    /// Whether the values of the unit of parameter `i` are set.
    /// @throws ContractViolation  the pass is past them, or there is no pass.
    [[nodiscard]] bool is_present(std::size_t i) const {
        Unit const& unit = units_[unit_of(i)];
        if (unit.is_present) {
            return true;
        }
        if (!is_open()) {
            throw ContractViolation{concat(
                "the values of ",
                describe(unit_of(i)),
                " are used outside a pass; call use() in the pass that forward() or backward() is given"
            )};
        }
        if (position_of(unit_of(i)) < arrived_) {
            throw ContractViolation{concat(
                "the ",
                pass_ == Pass::forward ? "forward" : "backward",
                " pass is past ",
                describe(unit_of(i)),
                ", but uses it again: units come in ",
                pass_ == Pass::forward ? "ascending" : "descending",
                " order, once each; where a value is used again, keep what use() returned until then"
            )};
        }
        return false;
    }
    /// Waits for the next unit and sets its values if it is the unit of parameter `i`. Returns
    /// false if gradients must be reduced first.
    bool approach(std::size_t i) { return arrive(unit_of(i)); }
    [[nodiscard]] Held hold(std::size_t i) {
        ++units_[unit_of(i)].holders;
        return {self_, unit_of(i)};
    }
    /// Allocates memory for all units. Local.
    void reserve_all() {
        require_released();
        for (std::size_t k = 0; k < units_.size(); ++k) {
            static_cast<void>(arenas_.data(k, k < overlapping ? largest_ : units_[k].bytes));
        }
    }
    /// Frees the memory that no pass needs, unless values are held. Local.
    void free_reserve() noexcept {
        if (arenas_.are_all_free()) {
            arenas_.keep(overlapping);
        }
    }
    /// Gathers all units at once, outside of passes. Memory for them must be reserved.
    [[nodiscard]] std::vector<Held> hold_all() {
        std::vector<Held> held;
        begin_forward();
        try {
            held.reserve(units_.size());
            for (Unit const& unit : units_) {
                static_cast<void>(approach(unit.parameters.front()));
                static_cast<void>(prefetch());
                held.push_back(hold(unit.parameters.front()));
            }
        } catch (...) { // the other ranks gather all units
            held.clear();
            while (pass_by()) {
            }
            reset();
            throw;
        }
        pass_ = Pass::none;
        current_ = nowhere;
        holds_all_ = true;
        return held;
    }
    /// Whether the next unit of the pass is the unit of parameter `i` and was held from the
    /// previous pass.
    [[nodiscard]] bool is_due(std::size_t i) const noexcept {
        return is_open() && units_[unit_of(i)].is_present && position_of(unit_of(i)) == arrived_;
    }

    /// "unit 2 (parameters 4 to 6)"
    [[nodiscard]] std::string describe(std::size_t k) const {
        return concat(
            "unit ",
            k,
            " (parameters ",
            units_[k].parameters.front(),
            " to ",
            units_[k].parameters.back(),
            ")"
        );
    }
    /// The bytes of the memory in which units are gathered.
    [[nodiscard]] std::size_t bytes() const noexcept { return arenas_.bytes(); }

private:
    enum class Pass : std::uint8_t { none, forward, between, backward };

    using Work = std::remove_cvref_t<decltype(gather_parts(
        std::declval<Comm&>(), std::declval<OptimizerShard const&>(), nullptr, nullptr
    ))>;

    /// One unit is in use while the next one is in flight.
    static constexpr std::size_t overlapping = 2;
    static constexpr std::size_t nowhere = BucketArenas::none;

    struct Part {
        std::size_t shard;
        std::size_t offset; ///< in the unit's memory, in bytes
    };
    /// A run of parameters of one group.
    struct Unit {
        std::size_t group;
        std::vector<Part> parts = {};
        std::vector<std::size_t> parameters = {}; ///< indices among those of all groups
        std::size_t bytes = 0;
        std::vector<std::optional<Work>> works = {}; ///< of the parts
        std::size_t holders = 0;
        std::size_t landing = nowhere; ///< the arena of a gather in flight
        std::size_t arena = nowhere;   ///< the arena of the values
        bool is_present = false;       ///< its values are set
    };

    void list(std::size_t k, ShardGroup const& group) {
        unit_of_.resize(group.first + group.parameters.size(), nowhere);
        for (std::size_t u = 0; u < group.units.size(); ++u) {
            Unit unit{k};
            std::size_t const end =
                u + 1 < group.units.size() ? group.units[u + 1] : group.shards.size();
            for (std::size_t s = group.units[u]; s < end; ++s) {
                OptimizerShard const& shard = group.shards[s];
                unit.parts.push_back({s, unit.bytes});
                unit.bytes += (shard.bucket_bytes() + 63) / 64 * 64;
                for (ShardPiece const& piece : shard.bucket().pieces) {
                    if (piece.begin == 0) {
                        unit.parameters.push_back(group.first + piece.parameter);
                        unit_of_[group.first + piece.parameter] = units_.size();
                    }
                }
            }
            std::sort(unit.parameters.begin(), unit.parameters.end());
            unit.works = std::vector<std::optional<Work>>(unit.parts.size());
            largest_ = (std::max)(largest_, unit.bytes);
            units_.push_back(std::move(unit));
        }
    }

    [[nodiscard]] bool is_open() const noexcept {
        return pass_ == Pass::forward || pass_ == Pass::backward;
    }
    [[nodiscard]] std::size_t position_of(std::size_t unit) const noexcept {
        return pass_ == Pass::backward ? units_.size() - 1 - unit : unit; // in reverse order
    }
    void require(Pass pass, char const* otherwise) const {
        if (pass_ != pass) {
            throw ContractViolation{otherwise};
        }
    }

    void begin(Pass pass, bool reduces) {
        pass_ = pass;
        reduces_ = reduces;
        launched_ = arrived_ = reduced_ = 0;
        current_ = nowhere;
        static_cast<void>(launch());
    }
    void finish() {
        while (pass_by()) {
        }
        leave_current();
    }

    bool launch() {
        if (launched_ == units_.size() || (reduces_ && reduced_ + 1 < launched_)) {
            return false;
        }
        Unit& unit = units_[position_of(launched_)];
        unit.landing = arenas_.take(unit.bytes);
        std::byte* const memory = arenas_.data(unit.landing, unit.bytes);
        ShardGroup const& group = groups_[unit.group];
        device_.submit(); // the engine's work reads what is in this memory first
        for (std::size_t k = 0; k < unit.parts.size(); ++k) {
            Part const& part = unit.parts[k];
            static_cast<void>(unit.works[k].emplace(gather_parts(
                comm_, group.shards[part.shard], group.values->at(part.shard), memory + part.offset
            )));
        }
        ++launched_;
        return true;
    }

    bool arrive(std::size_t used) {
        if (arrived_ == units_.size() || (launched_ == arrived_ && !launch())) {
            return false;
        }
        leave_current();
        current_ = position_of(arrived_);
        Unit& unit = units_[current_];
        for (std::optional<Work>& work : unit.works) {
            work->wait();
            work.reset();
        }
        device_.finish(); // the engine's work comes after it
        ++arrived_;
        if (unit.is_present) { // held from the previous pass
            arenas_.give_back(unit.landing);
        } else if (unit.arena = std::exchange(unit.landing, nowhere); current_ == used) {
            show(unit);
        }
        return true;
    }

    void show(Unit& unit) {
        unit.is_present = true; // also if setting one throws
        ShardGroup const& group = groups_[unit.group];
        for (Part const& part : unit.parts) {
            OptimizerShard const& shard = group.shards[part.shard];
            std::byte* const bucket = arenas_.data(unit.arena, 0) + part.offset;
            for (ShardPiece const& piece : shard.bucket().pieces) {
                if (piece.begin == 0) {
                    AnyParameter const& parameter = group.parameters[piece.parameter];
                    std::byte* const begin = bucket + piece.offset * shard.element();
                    parameter.set_value(OptimizerShard::place_of(parameter.value(), begin));
                }
            }
        }
    }
    void drop(Unit& unit) noexcept {
        if (std::exchange(unit.is_present, false)) {
            for (std::size_t const i : unit.parameters) {
                ShardGroup const& group = groups_[unit.group];
                group.parameters[i - group.first].release_value();
            }
        }
        arenas_.give_back(unit.arena);
    }
    void leave_current() noexcept {
        if (std::size_t const left = std::exchange(current_, nowhere);
            left != nowhere && units_[left].holders == 0) {
            drop(units_[left]);
        }
    }
    void release(std::size_t unit) noexcept {
        if (--units_[unit].holders == 0 && unit != current_) {
            drop(units_[unit]);
        }
        if (holds_all_ && arenas_.are_all_free()) {
            holds_all_ = false;
            free_reserve();
        }
    }

    Comm& comm_;
    Device& device_;
    std::vector<ShardGroup> const& groups_;
    std::shared_ptr<ShardedUnits*> self_; ///< for what is held
    BucketArenas arenas_;
    std::vector<std::size_t> unit_of_; ///< of each parameter of all groups
    std::size_t largest_ = 0;          ///< unit, in bytes
    Pass pass_ = Pass::none;
    bool reduces_ = false;
    bool holds_all_ = false;
    std::size_t launched_ = 0; ///< gathers of the pass
    std::size_t arrived_ = 0;
    std::size_t reduced_ = 0;       ///< units whose gradients are in flight
    std::size_t current_ = nowhere; ///< the last unit that arrived, until the pass is past it
    std::vector<Unit> units_;       ///< in the order of their parameters; destroyed first
};

}}} // namespace joinable::v0::detail
