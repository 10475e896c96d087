// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/mpi/detail/calls.hpp>
#include <joinable/communicator/mpi/detail/memory.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/reduction/halves.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Asks all other ranks what they have posted.
struct MpiQuestion {
    std::uint64_t number = 0; ///< from 1 on; 0: no question
    std::chrono::steady_clock::time_point asked_at{};
};

/// One collective or message of this rank, from its post to its end. The object is reused.
struct MpiOperation {
    enum class State {
        checking, ///< ranks compare it
        under_way,
        complete,
        lost, ///< an abort came first: MPI still has the memory
    };
    static constexpr MPI_Count too_much = -1; ///< as `received`

    /// A block of MpiMemory.
    struct Block {
        std::byte* data = nullptr;
        std::size_t bytes = 0;
    };

    State state = State::under_way;
    MpiTransfer transfer;
    MpiTables tables;
    std::uint64_t number = 0; ///< among this rank's collectives, or messages with its peer
    int peer = -1;            ///< of a message
    bool is_send = false;
    int tag = 0;
    std::optional<MPI_Count> received; ///< bytes, once a receive has ended
    std::string_view called;           ///< in texts, if it is not named as MPI's
    Comparison comparison;
    WaitClock polled;
    MpiQuestion question;    ///< asked at its deadline
    bool is_refused = false; ///< by MPI: its requests must not be tested again
    bool is_stalled = false; ///< all ranks had posted it one deadline ago

    [[nodiscard]] bool is_message() const noexcept { return peer >= 0; }
    [[nodiscard]] bool is_receive() const noexcept { return is_message() && !is_send; }
    /// The caller's request, which must be the same on all ranks.
    [[nodiscard]] Descriptor signature() const noexcept {
        Descriptor asked = transfer.signature;
        asked.dtype = dtype_;
        return asked;
    }
    /// Whether the comparison, if any, is over. This does not change when an abort comes.
    [[nodiscard]] bool moves_data() const noexcept { return comparison.is_over(); }
    [[nodiscard]] std::string text() const {
        if (!called.empty()) {
            return to_text(called);
        }
        if (!is_message()) {
            return signature().text();
        }
        return concat(
            is_send ? "a send to rank " : "a receive from rank ", peer, " with tag ", tag
        );
    }

    /// Takes `memory` for buffers that MPI must not have, and copies the inputs there. `is_wide`:
    /// 16-bit numbers are sent as f32 if they are combined.
    void prepare(Request const& request, MpiMemory& memory, bool is_wide) {
        auto const& [signature, in, out, sends, expects, pieces] = request;
        widens_ = is_wide && is_half_precision(signature.dtype) && signature.is_reduction();
        dtype_ = signature.dtype;
        transfer = {signature, nullptr, nullptr, sends, expects};
        transfer.signature.dtype = widens_ ? DType::f32 : signature.dtype;
        if (signature.has_counts) { // the caller's tables may end
            kept_.keep(transfer.sends, transfer.expects, ranks);
        }
        bool const is_one = is_one_buffer(signature.collective) && in.data == out.data;
        // If one buffer is a part of the other, MPI does not get the smaller one.
        bool const has_part = !is_one && overlap(in, out);
        bool const keeps_in = !widens_ && memory.has(in) &&
                              (is_one || !is_scaled(signature.collective)) &&
                              !(has_part && in.count <= out.count);
        bool const keeps_out = !widens_ && memory.has(out) && !(has_part && out.count < in.count);
        if (out.count != 0) {
            transfer.out =
                keeps_out ? static_cast<std::byte*>(out.data) : take(memory, out_, out.count);
        }
        if (in.count != 0) {
            if (is_one) {
                fill(in, transfer.out);
                transfer.in = transfer.out;
            } else if (keeps_in) {
                transfer.in = static_cast<std::byte const*>(in.data);
            } else {
                std::byte* const copy = take(memory, in_, in.count);
                fill(in, copy);
                transfer.in = copy;
            }
        }
        bool const is_source = signature.collective == Collective::broadcast && in.count != 0;
        result_ = keeps_out || is_source ? Buffer{} : out;
    }
    /// The same for a message.
    void prepare_message(Buffer buffer, MpiMemory& memory) {
        transfer = {};
        transfer.signature.dtype = buffer.dtype;
        transfer.signature.count = buffer.count;
        widens_ = false;
        bool const keeps = memory.has(buffer);
        transfer.out = keeps || buffer.count == 0 ? static_cast<std::byte*>(buffer.data)
                                                  : take(memory, out_, buffer.count);
        if (is_send && !keeps) {
            fill(buffer, transfer.out);
        }
        result_ = keeps || is_send ? Buffer{} : buffer;
    }
    /// Copies the result to the caller's buffer, and gives back the memory.
    void deliver(MpiMemory& memory) {
        if (result_.count != 0) {
            auto* const to = static_cast<std::byte*>(result_.data);
            if (widens_) {
                convert<Narrow>(result_.dtype, transfer.out, to, result_.count);
            } else {
                std::memcpy(to, transfer.out, result_.bytes());
            }
        }
        give_back(memory);
        state = State::complete;
    }
    /// Gives back the memory. @pre MPI has finished with it
    void give_back(MpiMemory& memory) noexcept {
        tables.clear();
        for (Block* const block : {&in_, &out_}) {
            if (block->data != nullptr) {
                memory.give_back(block->data, block->bytes);
                *block = {};
            }
        }
    }

    int ranks = 0; ///< of the communicator

private:
    [[nodiscard]] std::byte* take(MpiMemory& memory, Block& block, std::size_t count) const {
        std::size_t const bytes = count * size_of(transfer.signature.dtype);
        block = {memory.take(bytes), bytes};
        return block.data;
    }
    /// Copies, applying the factor if there is one. `to` may be the buffer itself.
    void fill(ConstBuffer from, std::byte* to) const {
        if (widens_) {
            convert<Widen>(from.dtype, static_cast<std::byte const*>(from.data), to, from.count);
            from = {to, from.count, DType::f32};
        }
        if (is_scaled(transfer.signature.collective)) {
            auto const view = [&](void const* data) {
                return AnyView{const_cast<void*>(data), from.dtype, {from.count}, {1}};
            };
            scale_copy(view(from.data), transfer.signature.factor, view(to));
        } else if (from.data != to) {
            std::memcpy(to, from.data, from.bytes());
        }
    }
    template <template <class> class Conversion>
    static void convert(DType dtype, std::byte const* from, std::byte* to, std::size_t count) {
        InstructionSet const set = instruction_set();
        auto* const function = dtype == DType::f16 ? ConvertLoops<Conversion<Half>>::of(set)
                                                   : ConvertLoops<Conversion<BFloat16>>::of(set);
        function(from, to, count);
    }

    Block in_;
    Block out_;
    Buffer result_{};         ///< the copy's target; empty: MPI wrote there directly
    DType dtype_ = DType::u8; ///< the caller's dtype
    bool widens_ = false;     ///< it is sent as f32
    KeptTables kept_;         ///< of a collective with counts
};

/// The operations of a rank, which are reused.
class MpiOperations {
public:
    explicit MpiOperations(int ranks) : ranks_{ranks} {}

    [[nodiscard]] MpiOperation& next() {
        if (free_.empty()) {
            free_.reserve(all_.size() + 1);
            all_.push_back(std::make_unique<MpiOperation>());
            all_.back()->ranks = ranks_;
            return *all_.back();
        }
        MpiOperation& operation = *free_.back();
        free_.pop_back();
        operation.called = {};
        operation.comparison.end();
        operation.peer = -1;
        operation.received.reset();
        operation.polled = {};
        operation.question = {};
        operation.is_refused = false;
        operation.is_stalled = false;
        return operation;
    }
    void give_back(MpiOperation& operation) noexcept { free_.push_back(&operation); } // has room

private:
    int ranks_;
    std::vector<std::unique_ptr<MpiOperation>> all_;
    std::vector<MpiOperation*> free_;
};

}}} // namespace joinable::v0::detail
