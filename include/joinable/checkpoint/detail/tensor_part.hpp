// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/on_all_ranks.hpp>
#include <joinable/checkpoint/detail/file.hpp>
#include <joinable/checkpoint/detail/safetensors.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/element_hash.hpp>
#include <joinable/tensor/shape.hpp>

/// @file
/// Transfers elements of a tensor between the memory of ranks and a file. Computes a hash of a
/// tensor that does not depend on how ranks share it.

namespace joinable { inline namespace v0 { namespace detail {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

/// The elements of a tensor that a rank has: `size` of them from position `begin` on, counted by
/// `order`.
struct TensorPart {
    std::size_t tensor; ///< its position in a list of stored ones
    std::byte* data;    ///< of the element at `offset`
    std::size_t offset; ///< in elements
    Shape strides;      ///< of the whole tensor
    Shape order;        ///< dense strides: positions of elements without gaps
    std::size_t begin;
    std::size_t size;

    [[nodiscard]] std::byte* at(std::size_t place, DType dtype) const noexcept {
        return data + (place - offset) * size_of(dtype);
    }
};

/// Calls `f(first, places)` for runs of elements that are adjacent in row-major order. `first` is
/// the row-major number of the first one; `places` are the addresses. It also goes through the
/// elements that the part does not have.
template <class F>
void for_each_run(
    StoredTensor const& tensor, TensorPart const& part, DeadlineRenewal& renewal, F const& f
) {
    std::array<std::byte*, 1024> places;
    std::size_t filled = 0;
    Shape const& extents = tensor.extents;
    Shape index = extents;
    std::fill_n(&index[0], index.size(), std::size_t{0});
    std::size_t place = 0;   // by the strides
    std::size_t counted = 0; // by the order
    std::size_t const count = tensor.numel();
    for (std::size_t i = 0; i < count; ++i) {
        bool const is_ours = counted >= part.begin && counted - part.begin < part.size;
        if (is_ours) {
            places[filled++] = part.at(place, tensor.dtype);
        }
        if (filled != 0 && (!is_ours || filled == places.size())) {
            f(i + (is_ours ? 1 : 0) - filled, std::span{places}.first(filled));
            filled = 0;
        }
        if (i % places.size() == places.size() - 1) {
            renewal.has_passed(places.size() * size_of(tensor.dtype));
        }
        for (std::size_t d = extents.size(); d-- > 0;) {
            place += part.strides[d];
            counted += part.order[d];
            if (++index[d] != extents[d]) {
                break;
            }
            place -= part.strides[d] * extents[d];
            counted -= part.order[d] * extents[d];
            index[d] = 0;
        }
    }
    if (filled != 0) {
        f(count - filled, std::span{places}.first(filled));
    }
}

/// Whether a part has the same order in memory as in the file.
[[nodiscard]] inline bool is_in_order(StoredTensor const& tensor, TensorPart const& part) {
    return is_contiguous(tensor.extents, part.strides);
}

inline std::uint64_t
hash_part(StoredTensor const& tensor, TensorPart const& part, DeadlineRenewal& renewal) {
    std::uint64_t sum = 0;
    if (is_in_order(tensor, part)) {
        std::size_t const element = size_of(tensor.dtype);
        std::size_t const piece = DeadlineRenewal::piece_bytes / element;
        for (std::size_t done = 0; done < part.size; done += piece) {
            std::size_t const some = (std::min)(part.size - done, piece);
            std::size_t const first = part.begin + done;
            sum += hash_elements(part.at(first, tensor.dtype), first, some, tensor.dtype);
            renewal.has_passed(some * element);
        }
        return sum;
    }
    for_each_run(tensor, part, renewal, [&](std::size_t first, std::span<std::byte* const> places) {
        for (std::size_t k = 0; k < places.size(); ++k) {
            sum += hash_elements(places[k], first + k, 1, tensor.dtype);
        }
    });
    return sum;
}

/// Gives the host parts that are in the memory of a device, one at a time. Parts in host memory are
/// given as they are. Local; the streams must have nothing in flight that waits for other ranks.
class PartsOnHost {
public:
    explicit PartsOnHost(Device& device) noexcept : device_{device} {}

    /// Calls f(part), which reads it.
    template <class F>
    void read(StoredTensor const& tensor, TensorPart const& part, F const& f) {
        if (is_on_host(device_)) {
            f(part);
        } else {
            f(copied(range_of(tensor, part), part));
        }
    }
    /// Calls f(part), which writes it.
    template <class F>
    void write(StoredTensor const& tensor, TensorPart const& part, F const& f) {
        if (is_on_host(device_)) {
            f(part);
            return;
        }
        Range const range = range_of(tensor, part); // what lies between its elements stays
        f(copied(range, part));
        if (range.bytes == 0) {
            return;
        }
        device_.upload(copy_.data(), range.data, range.bytes);
        device_.download(range.data, copy_.data(), range.bytes); // waits until it is there
    }

private:
    struct Range {
        std::byte* data;
        std::size_t bytes;
        std::size_t place; ///< of its first element
    };
    /// Without gaps a part is a run of memory, and other memory need not be there.
    static Range range_of(StoredTensor const& tensor, TensorPart const& part) {
        std::size_t const size = size_of(tensor.dtype);
        if (part.strides == part.order) {
            return {part.at(part.begin, tensor.dtype), part.size * size, part.begin};
        }
        std::size_t const reach = checked_reach(tensor.extents, part.strides, size);
        return {part.at(0, tensor.dtype), reach * size, 0};
    }
    TensorPart copied(Range const& range, TensorPart part) {
        if (copy_.bytes() < range.bytes) {
            copy_ = device_.allocate_staging(range.bytes);
        }
        if (range.bytes != 0) {
            device_.download(range.data, copy_.data(), range.bytes);
        }
        part.data = copy_.data();
        part.offset = range.place;
        return part;
    }

    Device& device_;
    Arena copy_;
};

/// The data of an open file. Between pieces it renews the deadline of ranks that wait for this one.
/// It syncs some pieces at a time, because nothing can renew the deadline within a sync.
class FileData {
public:
    /// The data begins at byte `first` of the file.
    FileData(File const& file, std::uint64_t first, ControlCommunicator& control) noexcept
        : file_{file}, first_{first}, renewal_{control} {}

    void write(StoredTensor const& tensor, TensorPart const& part) { move(tensor, part, true); }
    void read(StoredTensor const& tensor, TensorPart const& part) { move(tensor, part, false); }
    /// The hash of `count` elements in row-major order.
    [[nodiscard]] std::uint64_t
    hash(StoredTensor const& tensor, std::size_t first, std::size_t count) {
        std::uint64_t sum = 0;
        std::size_t const element = size_of(tensor.dtype);
        buffer_.resize(std::size_t{1} << 20U);
        for (std::size_t done = 0; done < count;) {
            std::size_t const some = (std::min)(count - done, buffer_.size() / element);
            file_.read(buffer_.data(), some * element, place_of(tensor, first + done));
            sum += hash_elements(buffer_.data(), first + done, some, tensor.dtype);
            done += some;
            renewal_.has_passed(some * element);
        }
        return sum;
    }

private:
    static constexpr std::size_t bytes_per_sync = std::size_t{64} << 20U;

    [[nodiscard]] std::uint64_t place_of(StoredTensor const& tensor, std::size_t i) const noexcept {
        return first_ + tensor.begin + std::uint64_t{i} * size_of(tensor.dtype);
    }

    void transfer(std::byte* data, std::size_t bytes, std::uint64_t at, bool writes) {
        if (!writes) {
            file_.read(data, bytes, at);
            return;
        }
        file_.write(data, bytes, at);
        unsynced_ += bytes;
        if (unsynced_ >= bytes_per_sync) {
            file_.sync_data();
            unsynced_ = 0;
        }
    }
    void move(StoredTensor const& tensor, TensorPart const& part, bool writes) {
        std::size_t const element = size_of(tensor.dtype);
        if (is_in_order(tensor, part)) {
            std::byte* const data = part.at(part.begin, tensor.dtype);
            std::uint64_t const at = place_of(tensor, part.begin);
            std::size_t const bytes = part.size * element;
            std::size_t const piece = DeadlineRenewal::piece_bytes;
            for (std::size_t done = 0; done < bytes; done += piece) {
                std::size_t const some = (std::min)(bytes - done, piece);
                transfer(data + done, some, at + done, writes);
                renewal_.has_passed(some);
            }
            return;
        }
        buffer_.resize(1024 * sizeof(double));
        for_each_run(
            tensor,
            part,
            renewal_,
            [&](std::size_t first, std::span<std::byte* const> places) {
                for (std::size_t k = 0; writes && k < places.size(); ++k) {
                    std::memcpy(buffer_.data() + k * element, places[k], element);
                }
                transfer(buffer_.data(), places.size() * element, place_of(tensor, first), writes);
                for (std::size_t k = 0; !writes && k < places.size(); ++k) {
                    std::memcpy(places[k], buffer_.data() + k * element, element);
                }
            }
        );
    }

    File const& file_;
    std::uint64_t first_;
    DeadlineRenewal renewal_;
    std::vector<std::byte> buffer_;
    std::size_t unsynced_ = 0; ///< bytes that were written since the last sync
};

/// A file that is open to read, with its header. FileData refers to it.
class StoredFile {
public:
    /// @throws CommunicationError  the system fails.
    /// @throws ContractViolation  the file is too short for a header, or for the one that it says it has.
    explicit StoredFile(std::string name)
        : name_{std::move(name)}, file_{name_, File::Access::read}, text_{read_header()} {}

    /// All ranks read the same file.
    void agree_on(AgreementList& list) const {
        list.add("hash of the header of the checkpoint", Hash{}.add(text_).value());
    }
    /// @throws ContractViolation  as HeaderParser::parse().
    [[nodiscard]] FileHeader header() const {
        return HeaderParser{name_, file_.bytes() - begin_of_data()}.parse(text_);
    }
    [[nodiscard]] FileData data(ControlCommunicator& control) const {
        return {file_, begin_of_data(), control};
    }

private:
    [[nodiscard]] std::string read_header() const {
        std::uint64_t const bytes = file_.bytes();
        std::string start(bytes < length_bytes ? 0 : length_bytes, '\0');
        file_.read(start.data(), start.size(), 0);
        std::string text(header_length(name_, start, bytes), '\0');
        file_.read(text.data(), text.size(), length_bytes);
        return text;
    }
    [[nodiscard]] std::uint64_t begin_of_data() const noexcept {
        return length_bytes + text_.size();
    }

    std::string name_;
    File file_;
    std::string text_; ///< of the header
};

}}} // namespace joinable::v0::detail
