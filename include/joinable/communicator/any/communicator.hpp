// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/detail/by_members.hpp>
#include <joinable/communicator/detail/can_split.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/substitute.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class C>
concept names_transport = requires {
    { C::transport } -> std::convertible_to<std::string_view>;
};

/// A communicator as a BasicAnyCommunicator calls it.
class AnyInterface : public ControlCommunicator {
public:
    [[nodiscard]] virtual std::string_view transport() const = 0;
    [[nodiscard]] virtual AnyWork post(Request const& request, Provided const& provided) = 0;
    [[nodiscard]] virtual AnyWork send(ConstBuffer buffer, int to, int tag) = 0;
    [[nodiscard]] virtual AnyWork receive(Buffer buffer, int from, int tag) = 0;
    [[nodiscard]] virtual std::unique_ptr<AnyInterface> split(int color, int key) = 0;
    [[nodiscard]] virtual bool can_split() const = 0;
    [[nodiscard]] virtual bool is_in_reach(ConstBuffer buffer) const noexcept = 0;
    [[nodiscard]] virtual bool sums_pieces() const noexcept = 0;
    [[nodiscard]] virtual std::vector<int> missing_ranks() const = 0;
    [[nodiscard]] virtual Arena allocate(std::size_t bytes, std::size_t alignment) = 0;
    [[nodiscard]] virtual ModelTable* model_table() = 0;
    [[nodiscard]] virtual void* device_memory() = 0;
};

[[noreturn]] inline void lacks(std::string_view transport, std::string_view what) {
    throw ContractViolation{
        concat("a ", transport, " has no ", what, "; choose a transport that has it on all ranks")
    };
}

/// `Held` is a communicator or a reference to one.
template <class Held>
class AnyHeld : public ControlOver<Held, AnyInterface> {
    using Base = ControlOver<Held, AnyInterface>;
    using Comm = std::remove_reference_t<Held>;

public:
    using Base::Base;
    using Base::communicator;

    [[nodiscard]] std::string_view transport() const override {
        if constexpr (names_transport<Comm>) {
            return Comm::transport;
        } else {
            return class_name<Comm>();
        }
    }
    [[nodiscard]] AnyWork post(Request const& request, Provided const& provided) override {
        return by_members(
            communicator(),
            request,
            []<Work W>(W&& work) { return AnyWork{std::forward<W>(work)}; },
            [&](Collective collective) { return substituted(collective, request, provided); }
        );
    }
    [[nodiscard]] AnyWork send(ConstBuffer buffer, int to, int tag) override {
        if constexpr (has_send<Comm>) {
            return AnyWork{communicator().send(buffer, to, tag)};
        } else {
            lacks("messages between two ranks");
        }
    }
    [[nodiscard]] AnyWork receive(Buffer buffer, int from, int tag) override {
        if constexpr (has_receive<Comm>) {
            return AnyWork{communicator().receive(buffer, from, tag)};
        } else {
            lacks("messages between two ranks");
        }
    }
    [[nodiscard]] std::unique_ptr<AnyInterface> split(int color, int key) override {
        if constexpr (has_split<Comm>) {
            using Part = decltype(communicator().split(color, key));
            return std::make_unique<AnyHeld<Part>>([&] { return communicator().split(color, key); }
            );
        } else {
            check_color(color);
            if (!can_split()) {
                lacks("split()");
            }
            if (auto const reason = this->abort_reason()) { // a later one does not reach the group
                throw_failure(*reason);
            }
            return std::make_unique<AnyHeld<SelfCommunicator>>([] { return SelfCommunicator{}; });
        }
    }
    [[nodiscard]] bool can_split() const override {
        return detail::can_split(communicator()) ||
               (reduces_host_memory<Comm> && communicator().size() == 1);
    }
    [[nodiscard]] bool sums_pieces() const noexcept override {
        return detail::sums_pieces(communicator());
    }
    [[nodiscard]] bool is_in_reach([[maybe_unused]] ConstBuffer buffer) const noexcept override {
        if constexpr (has_sum_of_pieces<Comm>) {
            return communicator().is_in_reach(buffer);
        } else {
            return false;
        }
    }
    [[nodiscard]] std::vector<int> missing_ranks() const override {
        if constexpr (has_missing_ranks<Comm>) {
            return communicator().missing_ranks();
        } else {
            return {};
        }
    }
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        return make_arena(communicator(), bytes, alignment);
    }
    [[nodiscard]] ModelTable* model_table() override {
        if constexpr (has_model_table<Comm>) {
            return communicator().model_table();
        } else {
            return nullptr;
        }
    }
    [[nodiscard]] void* device_memory() override {
        if constexpr (reduces_host_memory<Comm>) {
            return nullptr;
        } else {
            return std::addressof(communicator().device_memory());
        }
    }

private:
    [[noreturn]] static void lacks(std::string_view what) {
        detail::lacks(class_name<Comm>(), what);
    }
    [[nodiscard]] AnyWork
    substituted(Collective collective, Request const& request, Provided provided) {
        if constexpr (reduces_host_memory<Comm>) {
            std::vector<std::size_t> known;
            if (provided.known.empty() && tells_parts(request.signature)) {
                known = exchanged(request);
                provided.known = known;
            }
            return AnyWork{Substitute{communicator(), request, provided}};
        } else {
            lacks(name_of(collective));
        }
    }
    /// Collective; blocks.
    /// @throws Mismatch  on all ranks: their tables of counts differ. The communicator is aborted.
    [[nodiscard]] std::vector<std::size_t> exchanged(Request const& request) {
        Comparison counts;
        counts.begin(request.signature, communicator().rank(), communicator().size());
        static_cast<void>(counts.go_on(request.sends, request.expects));
        std::span<std::uint64_t> const words = counts.words();
        communicator().all_reduce({words.data(), words.size(), DType::u64}, ReduceOp::sum).wait();
        if (auto difference = counts.difference()) {
            difference->is_renumbered = this->is_renumbered();
            communicator().abort(*difference);
            throw_failure(communicator().abort_reason().value_or(*difference));
        }
        return counts.known();
    }
};

/// The first base, so that the communicator outlives the one that refers to it.
template <class Comm>
struct AnyOwned {
    std::unique_ptr<Comm> owned;
};
template <class Comm>
class AnyOwner final : AnyOwned<Comm>, public AnyHeld<Comm&> {
public:
    explicit AnyOwner(std::unique_ptr<Comm> comm)
        : AnyOwned<Comm>{std::move(comm)}, AnyHeld<Comm&>{*this->owned} {}
};

/// A communicator that a BasicAnyCommunicator takes.
template <class Comm, class Memory>
consteval bool fits_any() {
    static_assert(
        std::same_as<typename device_type_of<Comm>::type, Memory>,
        "BasicAnyCommunicator: this communicator moves memory of another device; AnyCommunicator is for host "
        "memory, and BasicAnyCommunicator<CudaDevice> for NCCL"
    );
    static_assert(
        TellsReason<Comm>,
        "BasicAnyCommunicator: expected members 'abort(AbortReason)', 'bool is_aborted()' and "
        "'std::optional<AbortReason> abort_reason() const'; use a communicator that models TellsReason"
    );
    return models_communicator<Comm>();
}

} // namespace detail

/// A communicator of any transport behind one type, for programs that choose the transport when they run, and
/// compile their training once.
///
/// @code
/// joinable::AnyCommunicator refers{comm};
/// joinable::AnyCommunicator owns{std::make_unique<joinable::MpiCommunicator>(MPI_COMM_WORLD)};
/// @endcode
///
/// A collective of the transport costs one virtual call more and allocates nothing more. In host memory, all_gather, gather, scatter,
/// all_to_all, reduce, reduce_scatter and scaled sums that the transport lacks are made of its all_reduce and
/// broadcast of whole buffers. A scaled sum then rounds each product to the dtype, in the buffer, before ranks compare
/// what they run. A gather, scatter or all_to_all by counts blocks in the call until all ranks have come, and
/// takes two words for each pair of ranks that exchange parts. Messages, split() and deadlines that the transport lacks are a
/// ContractViolation; a keep_alive() that it lacks does nothing. Everything else is as the transport documents it.
template <class DeviceType = HostDevice>
class BasicAnyCommunicator : public detail::Collectives<BasicAnyCommunicator<DeviceType>, AnyWork> {
public:
    using device_type = DeviceType;

    /// Refers to `comm`, which must outlive this object. Local.
    template <Communicator Comm>
        requires(!std::same_as<Comm, BasicAnyCommunicator>)
    explicit BasicAnyCommunicator(Comm& comm)
        : comm_{std::make_unique<detail::AnyHeld<Comm&>>(comm)} {
        static_assert(detail::fits_any<Comm, DeviceType>());
    }
    /// Owns `comm`. Local.
    /// @throws ContractViolation  the pointer is null.
    template <Communicator Comm>
    explicit BasicAnyCommunicator(std::unique_ptr<Comm> comm) {
        static_assert(detail::fits_any<Comm, DeviceType>());
        if (comm == nullptr) {
            throw ContractViolation{
                "AnyCommunicator: expected a std::unique_ptr to a communicator, given a null one"
            };
        }
        comm_ = std::make_unique<detail::AnyOwner<Comm>>(std::move(comm));
    }

    /// The transport's name, such as "mpi"; the name of the class if it names no `transport`.
    [[nodiscard]] std::string_view transport() const { return comm_->transport(); }

    [[nodiscard]] int rank() const { return comm_->rank(); }
    [[nodiscard]] int size() const { return comm_->size(); }

    /// Not collective. See SendsAndReceives.
    /// @throws ContractViolation  the transport has no messages.
    AnyWork send(ConstBuffer buffer, int to, int tag = 0) { return comm_->send(buffer, to, tag); }
    AnyWork receive(Buffer buffer, int from, int tag = 0) {
        return comm_->receive(buffer, from, tag);
    }
    /// Collective; blocks. See Splits.
    /// @throws ContractViolation  on all ranks: the transport cannot split.
    [[nodiscard]] BasicAnyCommunicator split(int color, int key) {
        return BasicAnyCommunicator{comm_->split(color, key)};
    }
    /// Local, the same on all ranks. Whether the transport can.
    [[nodiscard]] bool can_split() const { return comm_->can_split(); }

    /// Local. See Aborts and TellsReason.
    void abort(AbortReason const& reason) { comm_->abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_->is_aborted(); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return comm_->abort_reason(); }
    /// Local. Whether its group numbers some ranks differently from the communicator that was split.
    [[nodiscard]] bool is_renumbered() const { return comm_->is_renumbered(); }
    /// Local. See HasDeadline.
    /// @throws ContractViolation  the transport has none.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        auto const before = exchange_deadline(deadline);
        if (!before) {
            detail::lacks(transport(), "deadlines");
        }
        return *before;
    }
    /// Local. The same for callers that can do without: nothing if the transport has none.
    std::optional<std::chrono::nanoseconds> exchange_deadline(std::chrono::nanoseconds deadline) {
        return comm_->exchange_deadline(deadline);
    }
    /// Local. See RenewsDeadline. Does nothing, and returns false, if the transport cannot renew deadlines.
    bool keep_alive() { return comm_->keep_alive(); }
    /// The same, for callers that can do without. Guards call it, so a class that hides keep_alive()
    /// hides both.
    bool renew_deadline() { return keep_alive(); }
    /// Local. Empty if the transport does not report them.
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_->missing_ranks(); }

    /// Local. See make_arena().
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return comm_->allocate(bytes, alignment);
    }
    [[nodiscard]] device_type& device_memory()
        requires(!std::same_as<DeviceType, HostDevice>)
    {
        return *static_cast<DeviceType*>(comm_->device_memory());
    }
    /// For participants that train a model.
    [[nodiscard]] detail::ModelTable* model_table() { return comm_->model_table(); }
    /// For reducers: see detail::has_sum_of_pieces.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return comm_->is_in_reach(buffer);
    }
    [[nodiscard]] bool sums_pieces() const noexcept { return comm_->sums_pieces(); }
    AnyWork sum_pieces(detail::BufferPieces const& buffer, double factor) {
        return post(this->requests().sum_pieces(buffer, factor));
    }
    /// For guards.
    [[nodiscard]] void const* identity() const noexcept { return comm_->address(); }

private:
    friend class detail::BasicCollectives<BasicAnyCommunicator, AnyWork>;

    explicit BasicAnyCommunicator(std::unique_ptr<detail::AnyInterface> comm)
        : comm_{std::move(comm)} {}
    [[nodiscard]] AnyWork post(detail::Request const& request) { return comm_->post(request, {}); }

    std::unique_ptr<detail::AnyInterface> comm_;
};

/// For transports of host memory.
using AnyCommunicator = BasicAnyCommunicator<HostDevice>;

}} // namespace joinable::v0
