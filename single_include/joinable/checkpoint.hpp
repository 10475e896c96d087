// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <system_error>
#include <type_traits>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>

#include "join.hpp"
#include "zero.hpp"

// ---- joinable/agreement/on_all_ranks.hpp

#ifndef JOINABLE_AGREEMENT_ON_ALL_RANKS_HPP_PART_1
#define JOINABLE_AGREEMENT_ON_ALL_RANKS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Collective. Like agree(), but if ranks fail, ranks without an error throw the type of the lowest
/// failed rank's error: a file that one rank cannot write is the same failure on all.
inline void agree_alike(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& error
) {
    throw_if_any_failed(
        error,
        [&] {
            std::optional<AbortReason> failure = find_disagreement(control, list, error);
            if (failure && failure->kind == FailureKind::peer_failed) {
                FailureKind const own = error ? reason_of(error).kind : FailureKind::peer_failed;
                std::array<std::uint64_t, 1> kind{static_cast<std::uint64_t>(own)};
                control.broadcast(kind, failure->ranks.front());
                failure->kind = static_cast<FailureKind>(kind[0]);
            }
            return failure;
        },
        [&](AbortReason const& reason) { abort_for(control, reason); }
    );
}

/// Collective. Runs `work(list)` on every rank, then agrees on its exception and its entries in the
/// list.
template <class F>
void on_all_ranks(ControlCommunicator& control, F const& work) {
    AgreementList list;
    std::exception_ptr const error = exception_of([&] { work(list); });
    agree_alike(control, list, error);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/checkpoint/detail/file.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Throws CommunicationError with the system's reason.
[[noreturn]] inline void fail_at(std::string_view verb, std::string const& path) {
    int const code = errno;
    throw CommunicationError{
        concat("checkpoint: cannot ", verb, " ", path, ": ", std::generic_category().message(code))
    };
}

/// An open file. Members throw CommunicationError if the system fails.
class File {
public:
    enum class Access { read, write, create, folder };

    /// `create` makes a new file for writing; it must not exist.
    File(std::string path, Access access) : path_{std::move(path)} {
        constexpr int flags[] = {
            O_RDONLY, O_WRONLY, O_WRONLY | O_CREAT | O_EXCL, O_RDONLY | O_DIRECTORY
        };
        constexpr unsigned mode = 0666; // less the umask
        do {
            handle_ = ::open(path_.c_str(), flags[static_cast<int>(access)] | O_CLOEXEC, mode);
        } while (handle_ < 0 && errno == EINTR);
        if (handle_ < 0) {
            fail_at(access == Access::create ? "create" : "open", path_);
        }
    }
    File(File const&) = delete;
    File& operator=(File const&) = delete;
    ~File() { ::close(handle_); } // what must last was synced

    [[nodiscard]] std::uint64_t bytes() const {
        ::off_t const end = ::lseek(handle_, 0, SEEK_END);
        if (end < 0) {
            fail_at("find the size of", path_);
        }
        return static_cast<std::uint64_t>(end);
    }

    void write(void const* from, std::size_t bytes, std::uint64_t at) const {
        ::rlimit limit{};
        if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes != 0 && at + bytes > limit.rlim_cur) {
            errno = EFBIG; // the system would kill the process by SIGXFSZ
            fail_at("write", path_);
        }
        transfer("write", ::pwrite, static_cast<std::byte const*>(from), bytes, at);
    }
    void read(void* to, std::size_t bytes, std::uint64_t at) const {
        transfer("read", ::pread, static_cast<std::byte*>(to), bytes, at);
    }

    /// Returns when everything that this rank wrote would survive a power loss.
    void sync() const { sync_by(::fsync); }
    /// The same for what was written, without the file's times.
    void sync_data() const { sync_by(::fdatasync); }
    /// The same for the names in a folder. Some file systems cannot sync a folder, and say EINVAL.
    void sync_names() const { sync_by(::fsync, EINVAL); }

private:
    /// Ignores the error `accepted`.
    void sync_by(int (*call)(int), int accepted = 0) const {
        int result = call(handle_);
        while (result != 0 && errno == EINTR) {
            result = call(handle_);
        }
        if (result != 0 && errno != accepted) {
            fail_at("sync", path_);
        }
    }

    /// The system may transfer less than requested.
    template <class Call, class Byte>
    void transfer(
        std::string_view verb, Call* call, Byte* next, std::size_t bytes, std::uint64_t at
    ) const {
        while (bytes != 0) {
            ::ssize_t const done = call(handle_, next, bytes, static_cast<::off_t>(at));
            if (done < 0 && errno == EINTR) {
                continue;
            }
            if (done < 0) {
                fail_at(verb, path_);
            }
            if (done == 0) {
                throw CommunicationError{
                    concat("checkpoint: cannot ", verb, " ", path_, ": it ends at byte ", at)
                };
            }
            next += done;
            bytes -= static_cast<std::size_t>(done);
            at += static_cast<std::uint64_t>(done);
        }
    }

    std::string path_;
    int handle_ = -1;
};

/// A file that replaces another one when it is complete. The destructor removes a file that has not
/// replaced the other one.
class TemporaryFile {
public:
    /// Creates `path`. Removes a leftover of a killed training.
    explicit TemporaryFile(std::string path)
        : path_{without_leftover(std::move(path))}, file_{path_, File::Access::create} {}
    TemporaryFile(TemporaryFile const&) = delete;
    TemporaryFile& operator=(TemporaryFile const&) = delete;
    ~TemporaryFile() {
        if (!is_renamed_) {
            ::unlink(path_.c_str());
        }
    }

    [[nodiscard]] File const& file() const noexcept { return file_; }

    /// Renames the file to `target`, so that it also survives a power loss. If the folder cannot be
    /// synced, this throws although the file has its new name.
    void replace(std::string const& target, std::string const& folder) {
        File const place{folder, File::Access::folder}; // may fail, while the old file is there
        if (std::rename(path_.c_str(), target.c_str()) != 0) {
            fail_at("rename to", target);
        }
        is_renamed_ = true;
        place.sync_names();
    }

private:
    static std::string without_leftover(std::string path) {
        ::unlink(path.c_str()); // errors of the path show when it is created
        return path;
    }

    std::string path_;
    File file_;
    bool is_renamed_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/detail/safetensors.hpp

/// @file
/// The safetensors layout: 8 bytes with the length of the header, little-endian; the header in
/// JSON; the data, row-major tensors without gaps. Pure functions: text in, text out.

namespace joinable { inline namespace v0 { namespace detail {

/// A tensor in a file.
struct StoredTensor {
    std::string name;
    DType dtype = DType::f32;
    Shape extents;
    std::uint64_t begin = 0; ///< first of its bytes in the data
    std::uint64_t end = 0;

    [[nodiscard]] std::size_t numel() const { return joinable::numel(extents); }
};

struct FileHeader {
    std::vector<StoredTensor> tensors; ///< in any order
    std::map<std::string, std::string> metadata;
};

inline constexpr std::size_t length_bytes = 8; ///< before the header
inline constexpr std::uint64_t max_header_bytes =
    100'000'000; ///< the limit of the format's own library

/// The format's names, by DType.
inline constexpr std::string_view stored_dtypes[dtype_count] = {
    "F16", "BF16", "F32", "F64", "I8", "U8", "I32", "U32", "I64", "U64"
};

/// Throws ContractViolation about a file.
template <class... Pieces>
[[noreturn]] void refuse_file(std::string_view file, Pieces const&... pieces) {
    throw ContractViolation{concat("checkpoint ", file, ": ", pieces...)};
}

/// "f32 (2, 3)".
[[nodiscard]] inline std::string to_text(StoredTensor const& tensor) {
    return concat(name_of(tensor.dtype), " ", to_text(tensor.extents));
}

/// Places tensors one after another in the data. Those of larger elements come first, so that each
/// is aligned. Their order in the list stays.
inline void place_tensors(std::vector<StoredTensor>& tensors) {
    std::uint64_t next = 0;
    for (std::size_t const element : {8U, 4U, 2U, 1U}) {
        for (StoredTensor& tensor : tensors) {
            if (size_of(tensor.dtype) == element) {
                tensor.begin = next;
                next += tensor.numel() * element;
                tensor.end = next;
            }
        }
    }
}

/// The start of a file: the length and the header, padded with spaces to a multiple of 8 bytes.
/// @throws ContractViolation  a name is not UTF-8, or the header is longer than the format allows.
[[nodiscard]] inline std::string header_text(std::string_view file, FileHeader const& header) {
    using nlohmann::json;
    std::string text;
    try {
        json all = {{"__metadata__", header.metadata}};
        for (StoredTensor const& tensor : header.tensors) {
            json shape = json::array();
            for (std::size_t const extent : tensor.extents) {
                shape.push_back(extent);
            }
            json& entry = all[tensor.name];
            entry["dtype"] = stored_dtypes[static_cast<std::size_t>(tensor.dtype)];
            entry["shape"] = std::move(shape);
            entry["data_offsets"] = {tensor.begin, tensor.end};
        }
        text = all.dump();
    } catch (json::exception const& error) {
        refuse_file(file, "its header cannot be written: ", error.what());
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    if (text.size() > max_header_bytes) {
        refuse_file(
            file, "its header has ", text.size(), " bytes, but may have ", max_header_bytes
        );
    }
    std::string length;
    for (unsigned shift = 0; shift < 64; shift += 8) {
        length += static_cast<char>((std::uint64_t{text.size()} >> shift) & 0xffU);
    }
    return length + text;
}

/// The length of the header of a file of `file_bytes` bytes that begins with `start`.
/// @throws ContractViolation  the file is too short for it, or the header longer than the format
///         allows.
[[nodiscard]] inline std::uint64_t
header_length(std::string_view file, std::string_view start, std::uint64_t file_bytes) {
    if (file_bytes < length_bytes || start.size() < length_bytes) {
        refuse_file(
            file, "it has ", file_bytes, " bytes, but the length of its header alone has 8"
        );
    }
    std::uint64_t length = 0;
    for (std::size_t i = length_bytes; i-- > 0;) {
        length = length << 8U | static_cast<unsigned char>(start[i]);
    }
    std::uint64_t const most = (std::min)(file_bytes - length_bytes, max_header_bytes);
    if (length > most) {
        refuse_file(
            file,
            "its first 8 bytes announce a header of ",
            length,
            " bytes, but it can have at most ",
            most,
            " in a file of ",
            file_bytes
        );
    }
    return length;
}

/// Reads a header and refuses what the format does not allow. `data_bytes` is the size of the data.
class HeaderParser {
public:
    HeaderParser(std::string_view file, std::uint64_t data_bytes)
        : file_{file}, data_bytes_{data_bytes} {}

    /// @throws ContractViolation  the text names the tensor, the expected and the actual value.
    [[nodiscard]] FileHeader parse(std::string_view text) const {
        Json const all = parse_json(text);
        if (!all.is_object()) {
            refuse("its header is ", all.type_name(), ", but has to be a JSON object");
        }
        FileHeader header;
        for (auto const& [name, entry] : all.items()) {
            if (name == "__metadata__") {
                header.metadata = metadata_of(entry);
            } else {
                header.tensors.push_back(tensor_of(name, entry));
            }
        }
        check_places(header.tensors);
        return header;
    }

private:
    using Json = nlohmann::json;

    template <class... Pieces>
    [[noreturn]] void refuse(Pieces const&... pieces) const {
        refuse_file(file_, pieces...);
    }

    /// JSON allows a name twice; the format does not. Nesting deeper than a header's is refused at
    /// once.
    [[nodiscard]] Json parse_json(std::string_view text) const {
        std::vector<std::set<std::string>> names;
        auto const check = [&](int depth, Json::parse_event_t event, Json& parsed) {
            switch (event) {
            case Json::parse_event_t::object_start: names.emplace_back(); [[fallthrough]];
            case Json::parse_event_t::array_start:
                if (depth > 2) {
                    refuse("its header nests deeper than a header does");
                }
                break;
            case Json::parse_event_t::object_end: names.pop_back(); break;
            case Json::parse_event_t::key:
                if (!names.back().insert(parsed.get<std::string>()).second) {
                    refuse("its header has ", parsed.dump(), " twice");
                }
                break;
            case Json::parse_event_t::array_end:
            case Json::parse_event_t::value: break;
            }
            return true;
        };
        try {
            return Json::parse(text.begin(), text.end(), check);
        } catch (Json::exception const& error) {
            refuse("its header is no JSON: ", error.what());
        }
    }

    [[nodiscard]] std::map<std::string, std::string> metadata_of(Json const& entry) const {
        if (!entry.is_object()) {
            refuse(
                "its __metadata__ is ", entry.type_name(), ", but has to be an object of strings"
            );
        }
        std::map<std::string, std::string> metadata;
        for (auto const& [key, value] : entry.items()) {
            if (!value.is_string()) {
                refuse(
                    "__metadata__ has ",
                    value.type_name(),
                    " as ",
                    key,
                    ", but has to have a string"
                );
            }
            metadata.emplace(key, value.get<std::string>());
        }
        return metadata;
    }

    [[nodiscard]] StoredTensor tensor_of(std::string const& name, Json const& entry) const {
        StoredTensor tensor;
        tensor.name = name;
        Json const& dtype = field(name, entry, "dtype");
        auto const* const found = std::find(
            std::begin(stored_dtypes),
            std::end(stored_dtypes),
            dtype.is_string() ? dtype.get_ref<std::string const&>() : std::string{}
        );
        if (found == std::end(stored_dtypes)) {
            refuse(
                "tensor ", name, " is of dtype ", dtype.dump(), ", which is none of this library"
            );
        }
        tensor.dtype = static_cast<DType>(found - std::begin(stored_dtypes));
        auto const shape = numbers(name, entry, "shape");
        if (shape.size() > max_tensor_rank) {
            refuse(
                "tensor ",
                name,
                " has ",
                shape.size(),
                " dimensions, but may have ",
                max_tensor_rank
            );
        }
        for (std::uint64_t const extent : shape) {
            tensor.extents.push_back(extent);
        }
        auto const offsets = numbers(name, entry, "data_offsets");
        if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes_) {
            refuse(
                "tensor ",
                name,
                " has data_offsets ",
                field(name, entry, "data_offsets").dump(),
                ", but expected are a begin and an end within the ",
                data_bytes_,
                " bytes of data"
            );
        }
        tensor.begin = offsets[0];
        tensor.end = offsets[1];
        check_size(tensor);
        return tensor;
    }

    [[nodiscard]] Json const&
    field(std::string const& name, Json const& entry, char const* key) const {
        if (!entry.is_object() || !entry.contains(key)) {
            refuse("tensor ", name, " has no ", key);
        }
        return entry.at(key);
    }
    [[nodiscard]] std::vector<std::uint64_t>
    numbers(std::string const& name, Json const& entry, char const* key) const {
        Json const& list = field(name, entry, key);
        std::vector<std::uint64_t> found;
        for (Json const& number : list) {
            if (!list.is_array() || !number.is_number_unsigned()) {
                refuse(
                    "tensor ",
                    name,
                    " has ",
                    key,
                    " ",
                    list.dump(),
                    ", but expected are whole numbers"
                );
            }
            found.push_back(number.get<std::uint64_t>());
        }
        if (!list.is_array()) {
            refuse("tensor ", name, " has ", key, " ", list.dump(), ", but expected is a list");
        }
        return found;
    }

    void check_size(StoredTensor const& tensor) const {
        std::uint64_t const bytes = tensor.end - tensor.begin;
        std::uint64_t const most = bytes / size_of(tensor.dtype); // elements that the bytes hold
        std::uint64_t count = 1;
        bool fits = true;
        bool const is_empty =
            std::find(tensor.extents.begin(), tensor.extents.end(), 0U) != tensor.extents.end();
        for (std::size_t const extent : tensor.extents) {
            fits = fits && (is_empty || count <= most / extent);
            count *= is_empty || fits ? extent : 0;
        }
        if (!fits || count * size_of(tensor.dtype) != bytes) {
            refuse(
                "tensor ",
                tensor.name,
                " is ",
                to_text(tensor),
                ", but its data_offsets say ",
                bytes,
                " bytes"
            );
        }
    }

    /// Sorts the tensors, and throws unless they fill the data one after another.
    void check_places(std::vector<StoredTensor>& tensors) const {
        std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) {
            return std::pair{a.begin, a.end} < std::pair{b.begin, b.end};
        });
        std::uint64_t next = 0;
        for (StoredTensor const& tensor : tensors) {
            if (tensor.begin != next) {
                refuse(
                    "tensor ",
                    tensor.name,
                    " begins at byte ",
                    tensor.begin,
                    " of the data, but the one before ends at ",
                    next,
                    tensor.begin < next ? ": they overlap" : ": there is a gap"
                );
            }
            next = tensor.end;
        }
        if (next != data_bytes_) {
            refuse("its tensors have ", next, " bytes, but its data ", data_bytes_);
        }
    }

    std::string_view file_;
    std::uint64_t data_bytes_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/detail/tensor_part.hpp

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

/// Renews the deadline of the ranks that wait for this one, each time that it has gone through
/// another piece_bytes. Pieces are large, because a renewal is a message to every rank.
class DeadlineRenewal {
public:
    static constexpr std::size_t piece_bytes = std::size_t{8} << 20U;

    explicit DeadlineRenewal(ControlCommunicator& control) noexcept : control_{control} {}

    void has_passed(std::size_t bytes) {
        bytes_ += bytes;
        if (bytes_ >= piece_bytes) {
            bytes_ = 0;
            control_.keep_alive();
        }
    }

private:
    ControlCommunicator& control_;
    std::size_t bytes_ = 0; ///< since the last renewal
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

    void write(StoredTensor const& tensor, TensorPart const& part) {
        move(
            tensor,
            part,
            [&](std::byte* data, std::size_t bytes, std::uint64_t at) {
                file_.write(data, bytes, at);
                unsynced_ += bytes;
                if (unsynced_ >= bytes_per_sync) {
                    file_.sync_data();
                    unsynced_ = 0;
                }
            },
            true
        );
    }
    void read(StoredTensor const& tensor, TensorPart const& part) {
        move(
            tensor,
            part,
            [&](std::byte* data, std::size_t bytes, std::uint64_t at) {
                file_.read(data, bytes, at);
            },
            false
        );
    }
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

    template <class Transfer>
    void move(
        StoredTensor const& tensor, TensorPart const& part, Transfer const& transfer, bool writes
    ) {
        std::size_t const element = size_of(tensor.dtype);
        if (is_in_order(tensor, part)) {
            std::byte* const data = part.at(part.begin, tensor.dtype);
            std::uint64_t const at = place_of(tensor, part.begin);
            std::size_t const bytes = part.size * element;
            std::size_t const piece = DeadlineRenewal::piece_bytes;
            for (std::size_t done = 0; done < bytes; done += piece) {
                std::size_t const some = (std::min)(bytes - done, piece);
                transfer(data + done, some, at + done);
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
                transfer(buffer_.data(), places.size() * element, place_of(tensor, first));
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

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/detail/model_layout.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The tensors of a model and its optimizer, whichever rank has them: for each parameter its value,
/// then the state of its rule, then the master. A value is named as its parameter, or by its index.
/// State is named by that name, a slash and its own name.
class ModelLayout {
public:
    using Names = std::span<std::string_view const>; ///< of a rule

    /// `names` are the state names of each group's rule.
    /// @throws ContractViolation  two tensors would have one name.
    ModelLayout(
        std::string_view file, std::span<ShardGroup const> groups, std::vector<Names> const& names
    )
        : groups_{groups} {
        for (std::size_t k = 0; k < groups.size(); ++k) {
            append(groups[k], names[k]);
        }
        std::set<std::string_view> all{"__metadata__"};
        for (StoredTensor const& tensor : tensors_) {
            if (!all.insert(tensor.name).second) {
                refuse_file(
                    file,
                    "two tensors would be called ",
                    tensor.name,
                    "; give parameters names that differ, or none"
                );
            }
        }
    }

    [[nodiscard]] std::vector<StoredTensor> const& tensors() const noexcept { return tensors_; }
    void place() { place_tensors(tensors_); }

    /// Takes the positions of the tensors from a file.
    /// @throws ContractViolation  the file is of another model: names the first tensor that
    ///         differs.
    void place_as(std::string_view file, FileHeader const& header) {
        std::unordered_map<std::string_view, StoredTensor const*> stored;
        for (StoredTensor const& tensor : header.tensors) {
            stored.emplace(tensor.name, &tensor);
        }
        for (StoredTensor& tensor : tensors_) {
            auto const found = stored.find(tensor.name);
            bool const is_there = found != stored.end();
            if (!is_there || found->second->dtype != tensor.dtype ||
                found->second->extents != tensor.extents) {
                refuse_file(
                    file,
                    "it is of another model: expected is tensor ",
                    tensor.name,
                    ", ",
                    to_text(tensor),
                    ", but it has ",
                    is_there ? to_text(*found->second) : "none of that name"
                );
            }
            tensor.begin = found->second->begin;
            tensor.end = found->second->end;
            stored.erase(found);
        }
        for (StoredTensor const& tensor : header.tensors) {
            if (stored.contains(tensor.name)) {
                refuse_file(
                    file,
                    "it is of another model: it has tensor ",
                    tensor.name,
                    ", ",
                    to_text(tensor),
                    ", which the model lacks"
                );
            }
        }
    }

    /// The optimizer state that this rank owns, and all that it keeps.
    [[nodiscard]] std::vector<TensorPart> own_state() const { return state(&OptimizerShard::own); }
    [[nodiscard]] std::vector<TensorPart> kept_state() const {
        return state(&OptimizerShard::kept);
    }
    /// The elements of each value that this rank owns. The frozen parameters too, if it `is_first`.
    [[nodiscard]] std::vector<TensorPart> own_values(bool is_first) const {
        std::vector<TensorPart> parts;
        for_each_own([&](ShardGroup const& group, OptimizerShard const&, ShardPiece const& piece) {
            parts.push_back(value_of(group, piece.parameter));
            parts.back().begin = piece.begin;
            parts.back().size = piece.size;
        });
        for (ShardGroup const& group : groups_) {
            for (std::size_t const i : group.frozen) {
                if (is_first) {
                    parts.push_back(value_of(group, i));
                }
            }
        }
        return parts;
    }
    /// All values, whole. If ranks keep parts of values, the parts of this rank.
    [[nodiscard]] std::vector<TensorPart> values() const {
        if (!groups_.empty() && groups_.front().shards_values()) {
            return own_values(true);
        }
        std::vector<TensorPart> parts;
        for (ShardGroup const& group : groups_) {
            for (std::size_t i = 0; i < group.parameters.size(); ++i) {
                parts.push_back(value_of(group, i));
            }
        }
        return parts;
    }
    /// The step count of each parameter whose first element this rank owns; 0 for the others.
    [[nodiscard]] std::vector<std::uint64_t> own_steps() const {
        std::vector<std::uint64_t> steps(first_of_.size());
        for_each_own([&](ShardGroup const& group, OptimizerShard const&, ShardPiece const& piece) {
            if (piece.begin == 0) {
                steps[group.first + piece.parameter] = group.steps[piece.parameter];
            }
        });
        return steps;
    }
    [[nodiscard]] std::vector<std::uint64_t> group_sizes() const {
        std::vector<std::uint64_t> sizes;
        for (ShardGroup const& group : groups_) {
            sizes.push_back(group.parameters.size());
        }
        return sizes;
    }

private:
    using Pieces = std::span<ShardPiece const> (OptimizerShard::*)() const noexcept;

    void append(ShardGroup const& group, Names names) {
        std::vector<StateArrays const*> states(group.parameters.size());
        for (OptimizerShard const& shard : group.shards) {
            for (ShardPiece const& piece : shard.bucket().pieces) {
                states[piece.parameter] = &shard.state();
            }
        }
        for (std::size_t i = 0; i < group.parameters.size(); ++i) {
            AnyView const value = group.parameters[i].value();
            std::string name{group.parameters[i].name()};
            if (name.empty()) {
                name = std::to_string(group.first + i);
            }
            first_of_.push_back(tensors_.size());
            tensors_.push_back({name, value.dtype(), value.extents()});
            if (states[i] == nullptr) {
                continue; // frozen
            }
            for (std::string const& array : array_names(names, *states[i])) {
                tensors_.push_back(
                    {concat(name, "/", array), states[i]->computed_in(), value.extents()}
                );
            }
        }
    }

    [[nodiscard]] std::vector<TensorPart> state(Pieces which) const {
        std::vector<TensorPart> parts;
        for_each_piece(
            which,
            [&](ShardGroup const& group, OptimizerShard const& shard, ShardPiece const& piece) {
                AnyView const value = group.parameters[piece.parameter].value();
                Shape const order = dense_strides(value.extents(), value.strides());
                std::size_t const place = shard.place_of_state(piece);
                std::size_t const first = first_of_[group.first + piece.parameter] + 1;
                for (std::size_t k = 0; k < shard.state().arrays(); ++k) {
                    parts.push_back(
                        {first + k,
                         shard.state().array(k, place),
                         piece.begin,
                         order,
                         order,
                         piece.begin,
                         piece.size}
                    );
                }
            }
        );
        return parts;
    }

    template <class F>
    void for_each_piece(Pieces which, F const& f) const {
        for (ShardGroup const& group : groups_) {
            for (OptimizerShard const& shard : group.shards) {
                for (ShardPiece const& piece : (shard.*which)()) {
                    f(group, shard, piece);
                }
            }
        }
    }
    template <class F>
    void for_each_own(F const& f) const {
        for_each_piece(&OptimizerShard::own, f);
    }

    [[nodiscard]] TensorPart value_of(ShardGroup const& group, std::size_t i) const {
        AnyView const value = group.parameters[i].value();
        Shape const& extents = value.extents();
        // If all ranks have the whole value, a share is one run of the file; otherwise one run of
        // this rank's memory.
        return {
            first_of_[group.first + i],
            static_cast<std::byte*>(value.data()),
            0,
            value.strides(),
            group.shards_values() ? dense_strides(extents, value.strides())
                                  : row_major_strides(extents),
            0,
            value.numel()
        };
    }

    std::span<ShardGroup const> groups_;
    std::vector<StoredTensor> tensors_;
    std::vector<std::size_t> first_of_; ///< position of each parameter's value
};

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/detail/settings.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The settings of a rule as texts, by the labels of its agree_on().
using RuleSettings = std::map<std::string, std::string>;

template <class Rule>
concept names_settings = requires(Rule const& rule, AgreementList& list) { rule.agree_on(list); };

template <class Rule>
[[nodiscard]] AgreementList listed_settings(Rule const& rule) {
    AgreementList list;
    if constexpr (names_settings<Rule>) {
        rule.agree_on(list);
    }
    return list;
}

/// @throws ContractViolation  two settings have one label.
template <class Rule>
[[nodiscard]] RuleSettings stored_settings(Rule const& rule) {
    RuleSettings settings;
    AgreementList const list = listed_settings(rule);
    for (AgreementList::Item const& item : list.items()) {
        if (!settings.emplace(item.label, item.value).second) {
            throw ContractViolation{concat(
                "the rule's agree_on() adds two settings named ",
                item.label,
                ", but a checkpoint has one of each name"
            )};
        }
    }
    return settings;
}

static_assert(sizeof(bool) == 1);

/// Writes the number that `text` stands for. Returns false if it stands for none of this type.
template <class T>
[[nodiscard]] bool write_number(std::string_view text, std::byte* at) {
    T number{};
    auto const [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || rest != text.data() + text.size()) {
        return false;
    }
    std::memcpy(at, &number, sizeof number);
    return true;
}
[[nodiscard]] inline bool write_setting(AgreedType type, std::string_view text, std::byte* at) {
    switch (type) {
    case AgreedType::boolean:
        if (text != "true" && text != "false") {
            return false;
        }
        at[0] = std::byte{text == "true"};
        return true;
    case AgreedType::i8: return write_number<std::int8_t>(text, at);
    case AgreedType::i16: return write_number<std::int16_t>(text, at);
    case AgreedType::i32: return write_number<std::int32_t>(text, at);
    case AgreedType::i64: return write_number<std::int64_t>(text, at);
    case AgreedType::u8: return write_number<std::uint8_t>(text, at);
    case AgreedType::u16: return write_number<std::uint16_t>(text, at);
    case AgreedType::u32: return write_number<std::uint32_t>(text, at);
    case AgreedType::u64: return write_number<std::uint64_t>(text, at);
    case AgreedType::f32: return write_number<float>(text, at);
    case AgreedType::f64: return write_number<double>(text, at);
    case AgreedType::other: break;
    }
    return false;
}

/// Gives the members of `rule` that its agree_on() adds the values that a file has for them. What
/// it adds besides, such as a computed text, must then be what the file says.
/// @throws ContractViolation  they differ in a label, or a value is none of the member's type; the
///         text names the setting.
template <class Rule>
void set_settings(
    std::string_view file, std::size_t group, RuleSettings const& stored, Rule& rule
) {
    static_assert(std::is_trivially_copyable_v<Rule>);
    auto* const begin = reinterpret_cast<std::byte*>(&rule);
    // Members may be added only where others have some value, so once more after those are set.
    bool is_changed = true;
    for (int pass = 0; is_changed && pass < 3; ++pass) {
        is_changed = false;
        AgreementList const list = listed_settings(rule);
        for (std::size_t i = 0; i < list.items().size(); ++i) {
            auto const& [label, value] = list.items()[i];
            auto const& [address, type] = list.places()[i];
            auto const found = stored.find(label);
            if (found == stored.end() || found->second == value) {
                continue;
            }
            auto const* const at = static_cast<std::byte const*>(address);
            bool const is_member = type != AgreedType::other && !std::less<>{}(at, begin) &&
                                   std::less<>{}(at, begin + sizeof(Rule));
            if (is_member && write_setting(type, found->second, begin + (at - begin))) {
                is_changed = true;
            }
        }
    }
    RuleSettings const own = stored_settings(rule);
    auto const refuse = [&](std::string const& label) {
        auto const text = [&](RuleSettings const& settings) {
            auto const found = settings.find(label);
            return found == settings.end() ? std::string{"missing"} : in_quotes(found->second);
        };
        refuse_file(
            file,
            "its setting ",
            label,
            " of group ",
            group,
            " is ",
            text(stored),
            ", but here it is ",
            text(own),
            ", and cannot be set to that"
        );
    };
    for (auto const& [label, value] : own) {
        auto const found = stored.find(label);
        if (found == stored.end() || found->second != value) {
            refuse(label);
        }
    }
    for (auto const& [label, value] : stored) {
        if (!own.contains(label)) {
            refuse(label);
        }
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/detail/training_state.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The contents of a checkpoint besides tensors.
struct TrainingState {
    std::uint64_t rounds = 0;
    std::uint64_t world_size = 0;                ///< of the training that wrote it, for information
    std::string rule;                            ///< the name of the class
    std::vector<RuleSettings> rules;             ///< of the groups
    std::vector<std::uint64_t> group_sizes;      ///< parameters of each group
    std::vector<std::uint64_t> steps;            ///< of each parameter
    std::map<std::string, std::uint64_t> hashes; ///< of each tensor, by name
};

inline constexpr std::string_view checkpoint_format = "joinable checkpoint";
inline constexpr std::uint64_t checkpoint_version = 2; ///< 1 had the settings as bytes

[[nodiscard]] inline std::string hex_of(std::string_view bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (char const byte : bytes) {
        auto const number = static_cast<unsigned char>(byte);
        text += {digits[number >> 4U], digits[number & 0xfU]};
    }
    return text;
}
[[nodiscard]] inline std::string hex_of(std::uint64_t number) {
    std::string bytes;
    for (unsigned shift = 64; shift != 0; shift -= 8) {
        bytes += static_cast<char>((number >> (shift - 8)) & 0xffU);
    }
    return hex_of(bytes);
}

/// The numbers, separated by spaces.
[[nodiscard]] inline std::string listed(std::vector<std::uint64_t> const& numbers) {
    std::string text;
    for (std::uint64_t const number : numbers) {
        text += (text.empty() ? "" : " ") + std::to_string(number);
    }
    return text;
}

/// Before the label of a setting of group `k`.
[[nodiscard]] inline std::string prefix_of_rule(std::size_t k) {
    return concat("rule ", k, ": ");
}

/// A hash of all metadata except itself.
[[nodiscard]] inline std::string checksum_of(std::map<std::string, std::string> const& metadata) {
    Hash hash;
    for (auto const& [key, value] : metadata) {
        if (key != "checksum") {
            hash.add(key).add(key.size()).add(value).add(value.size());
        }
    }
    return hex_of(hash.value());
}

[[nodiscard]] inline std::map<std::string, std::string> metadata_of(TrainingState const& state) {
    std::map<std::string, std::string> metadata{
        {"format", std::string{checkpoint_format}},
        {"version", std::to_string(checkpoint_version)},
        {"rounds", std::to_string(state.rounds)},
        {"world size", std::to_string(state.world_size)},
        {"rule", state.rule},
        {"groups", listed(state.group_sizes)},
        {"steps", listed(state.steps)},
    };
    for (std::size_t k = 0; k < state.rules.size(); ++k) {
        for (auto const& [label, value] : state.rules[k]) {
            metadata.emplace(prefix_of_rule(k) + label, value);
        }
    }
    for (auto const& [name, hash] : state.hashes) {
        metadata.emplace("hash of " + name, hex_of(hash));
    }
    metadata.emplace("checksum", checksum_of(metadata));
    return metadata;
}

/// Parses metadata. A value that does not fit is refused by its key.
class MetadataReader {
public:
    MetadataReader(std::string_view file, std::map<std::string, std::string> const& metadata)
        : file_{file}, metadata_{metadata} {}

    /// @throws ContractViolation  the text names the key, the expected and the actual value.
    [[nodiscard]] TrainingState state() const {
        require("format", std::string{checkpoint_format});
        if (std::uint64_t const version = number("version"); version != checkpoint_version) {
            refuse_file(
                file_,
                "its version is ",
                version,
                ", but expected is ",
                checkpoint_version,
                "; continue this training with the version of joinable that wrote the file"
            );
        }
        require("checksum", checksum_of(metadata_));
        TrainingState state;
        state.rounds = number("rounds");
        state.world_size = number("world size");
        state.rule = text("rule");
        state.group_sizes = numbers("groups");
        state.steps = numbers("steps");
        for (std::size_t k = 0; k < state.group_sizes.size(); ++k) {
            state.rules.push_back(settings(prefix_of_rule(k)));
        }
        constexpr std::string_view prefix = "hash of ";
        for (auto const& [key, value] : metadata_) {
            if (key.starts_with(prefix)) {
                std::uint64_t hash = 0;
                for (char const byte : bytes(key)) {
                    hash = hash << 8U | static_cast<unsigned char>(byte);
                }
                state.hashes.emplace(key.substr(prefix.size()), hash);
            }
        }
        return state;
    }

private:
    [[nodiscard]] std::string const& text(std::string const& key) const {
        auto const found = metadata_.find(key);
        if (found == metadata_.end()) {
            refuse_file(
                file_, "its __metadata__ has no ", key, "; expected is a file that Checkpoint wrote"
            );
        }
        return found->second;
    }
    void require(std::string const& key, std::string const& expected) const {
        if (text(key) != expected) {
            refuse_file(
                file_,
                "its ",
                key,
                " is ",
                in_quotes(text(key)),
                ", but expected is ",
                in_quotes(expected)
            );
        }
    }
    [[nodiscard]] std::vector<std::uint64_t> numbers(std::string const& key) const {
        std::string const& list = text(key);
        std::vector<std::uint64_t> found;
        char const* next = list.data();
        char const* const end = next + list.size();
        while (next != end) {
            std::uint64_t number = 0;
            auto const [rest, error] = std::from_chars(next, end, number);
            if (error != std::errc{} || (rest != end && (*rest != ' ' || rest + 1 == end))) {
                refuse_file(
                    file_, "its ", key, " is ", in_quotes(list), ", but expected are whole numbers"
                );
            }
            found.push_back(number);
            next = rest == end ? rest : rest + 1;
        }
        return found;
    }
    [[nodiscard]] std::uint64_t number(std::string const& key) const {
        auto const found = numbers(key);
        if (found.size() != 1) {
            refuse_file(
                file_, "its ", key, " is ", in_quotes(text(key)), ", but expected is a number"
            );
        }
        return found.front();
    }
    [[nodiscard]] RuleSettings settings(std::string const& prefix) const {
        RuleSettings found;
        for (auto next = metadata_.lower_bound(prefix);
             next != metadata_.end() && next->first.starts_with(prefix);
             ++next) {
            found.emplace(next->first.substr(prefix.size()), next->second);
        }
        return found;
    }
    [[nodiscard]] std::string bytes(std::string const& key) const {
        std::string const& hex = text(key);
        std::string found;
        for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
            unsigned byte = 0;
            auto const end = std::from_chars(&hex[i], &hex[i] + 2, byte, 16).ptr;
            found += end == &hex[i] + 2 ? std::string(1, static_cast<char>(byte)) : "";
        }
        if (2 * found.size() != hex.size()) {
            refuse_file(
                file_, "its ", key, " is ", in_quotes(hex), ", but expected are pairs of hex digits"
            );
        }
        return found;
    }

    std::string_view file_;
    std::map<std::string, std::string> const& metadata_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/checkpoint.hpp

#if !defined(__linux__)
#error "<joinable/checkpoint.hpp> needs the files of Linux; elsewhere save zero.state()"
#endif

namespace joinable { inline namespace v0 {

/// Options of a Checkpoint. The same on every rank.
struct CheckpointOptions {
    std::size_t every = 1; ///< a file is written in every `every`-th round that syncs
};

/// Saves the training of a ZeroRedundancyOptimizer or a ShardedDataParallel in one file: values,
/// state, settings of the rules and step counts. Each rank writes what it owns. Any number of ranks
/// can read it, with either partition.
///
/// @code
/// joinable::Checkpoint save{zero, "model.safetensors", {.every = 100}};
/// if (std::filesystem::exists("model.safetensors")) {
///     save.read();                              // then skip the first save.rounds() batches
/// }
/// joinable::Join guard{joinable::participants(ddp, zero, save)};
/// for (auto const& batch : rest_of(my_shard, save.rounds())) {
///     train(batch);
///     zero.step();
///     save.step();                              // writes in every 100th round
/// }
/// guard.finish();
/// @endcode
///
/// The layout is safetensors: Python's `safetensors.torch.load_file` reads it. A parameter is
/// stored under its name, or its index if it has none; its state under "NAME/exp_avg", its master
/// under "NAME/master". The settings of a rule are stored as texts under the labels of its
/// agree_on(), which it needs; what that leaves out is not in the file. All ranks must see one file system. The new file is written beside the old
/// one as "FILE.part" and replaces it when it is complete and on the disk, so killing the training
/// at any time leaves a complete file. Memory of a device goes through the host's,
/// one tensor at a time, while the host waits. Only one training may write a file at a time. The caller
/// saves ZeroOptions::shared, buffers and the position in the inputs.
template <class Comm, class Rule>
class Checkpoint {
    static_assert(models_communicator<Comm>());
    static_assert(
        UpdateRule<Rule>,
        "Checkpoint: an engine's optimizer keeps its state itself; save and load it on the owner of each "
        "parameter, which owner_of() names"
    );
    static_assert(
        !UpdateRule<Rule> || detail::names_settings<Rule> || std::is_empty_v<Rule>,
        "Checkpoint: a rule with settings needs a const member 'void agree_on(joinable::AgreementList& "
        "list)' that adds them: a file has the settings by these labels"
    );

public:
    /// Local. The optimizer must outlive it. Groups may still be added to the optimizer.
    /// @throws ContractViolation  `every` is 0.
    Checkpoint(
        ShardedOptimizer<Comm, Rule>& zero,
        std::filesystem::path const& file,
        CheckpointOptions options = {}
    )
        : zero_{zero}, file_{file.string()},
          folder_{file.has_parent_path() ? file.parent_path().string() : "."}, options_{options} {
        if (options.every == 0) {
            throw ContractViolation{
                "CheckpointOptions::every is 0, but a file is written every 1 or more rounds"
            };
        }
    }

    /// Collective, outside a guard. Writes the file now. Each rank brings 64 MiB at a time to the
    /// disk, and the deadline must cover that, for all ranks that write to one disk together. On the
    /// first three errors all ranks throw, and the communicator is usable: a rank that fails throws its
    /// own error, and the others that of the first rank that failed. The old file
    /// stays, with one exception: "cannot sync" the folder means that the new file, which is
    /// complete, has replaced it, but a power loss may bring the old one back.
    /// @throws CommunicationError  a rank cannot write.
    /// @throws ContractViolation  in a guard, two parameters have one name, or a rule keeps another
    ///         number of states than when its group was added.
    /// @throws Mismatch  settings or rounds() differ between ranks, as after a guard that failed: set
    ///         the settings on all ranks.
    /// @throws what the communicator throws.
    void write() {
        require_outside("write()");
        write_file();
    }

    /// Collective, outside a guard. Reads the file: values, state, settings and rounds(). On the
    /// first two errors all ranks throw as in write().
    /// @throws ContractViolation  in a guard, the file is not a complete checkpoint of this model and rule: the text
    ///         names the first tensor that differs; or the elements of a value come in another order than when it was
    ///         given. Nothing was changed.
    /// @throws CommunicationError  a rank cannot read; what was read so far is kept.
    /// @throws what the communicator throws.
    void read() { read(file_); }
    /// Reads another file; write() keeps its own.
    void read(std::filesystem::path const& from) {
        require_outside("read()");
        read_file(from.string());
    }

    /// Counts a round and writes the file in every CheckpointOptions::every-th one. Call it once in
    /// each round that syncs, after the optimizer has stepped. Collective. Throws what write()
    /// throws.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { run(round); });
    }

    /// The number of step() calls, including joined rounds and the rounds of the training that was
    /// read. Each rank with enough inputs has had this many batches. Local.
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }

    /// Runs the same steps on joined ranks.
    class Hook {
    public:
        using runs_after = labels_of<labels::shards, labels::gradients>;

        explicit Hook(Checkpoint& checkpoint) noexcept : checkpoint_{checkpoint} {}
        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) { checkpoint_.run(round); }
        void post_hook(bool) noexcept {}

    private:
        Checkpoint& checkpoint_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return zero_.join_communicator(); }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "Checkpoint"; }
    static constexpr std::string_view join_verb = "step()";
    void agree_on(AgreementList& list) const {
        list.add("file", file_);
        list.add("every", options_.every);
        list.add("rounds", rounds_);
    }

private:
    void require_outside(std::string_view verb) {
        if (detail::session_of(state_) != nullptr ||
            detail::session_of(zero_.join_state()) != nullptr) {
            throw ContractViolation{detail::concat(
                "Checkpoint::",
                verb,
                " was called in a guard; call it before or after, on every rank"
            )};
        }
        detail::require_listed(state_, join_communicator(), "Checkpoint");
    }

    void run(Round const& round) {
        ++rounds_;
        if (rounds_ % options_.every == 0) {
            zero_.take_settings(round); // the loop may have set those of the next step
            write_file();
        }
    }

    template <class Rules>
    [[nodiscard]] detail::ModelLayout layout_by(std::string const& name, Rules const& rules) const {
        std::vector<detail::ModelLayout::Names> names;
        for (Rule const& rule : rules) {
            names.emplace_back(rule.state_names());
        }
        return {name, zero_.groups(), names};
    }

    /// On a device the host first waits for collectives in flight, which have a deadline; streams
    /// have none.
    void wait_for_work() {
        Comm& comm = join_communicator();
        detail::device_of(comm).submit(); // after the engine's work
        if constexpr (requires { comm.synchronize(); }) {
            comm.synchronize();
        }
    }

    void write_file() {
        detail::ControlOver<Comm&> control{join_communicator()};
        bool const is_root = control.rank() == 0;
        std::optional<detail::ModelLayout> layout;
        std::vector<detail::TensorPart> parts;
        std::vector<std::uint64_t> words; // steps of each parameter, hash of each tensor
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            detail::agree_on_rules(list, zero_.rules());
            list.add("rounds", rounds_);
            wait_for_work();
            detail::check_before_save(zero_.groups(), zero_.rules());
            layout.emplace(layout_by(file_, zero_.rules()));
            layout->place();
            parts = layout->own_state();
            for (detail::TensorPart const& part : layout->own_values(is_root)) {
                parts.push_back(part);
            }
            words = layout->own_steps();
            std::size_t const parameters = words.size();
            words.resize(parameters + layout->tensors().size());
            detail::DeadlineRenewal renewal{control};
            for (detail::TensorPart const& part : parts) {
                detail::StoredTensor const& tensor = layout->tensors()[part.tensor];
                on_host.read(tensor, part, [&](detail::TensorPart const& here) {
                    words[parameters + part.tensor] += hash_part(tensor, here, renewal);
                });
            }
        });
        control.sum(words);

        std::string const temporary = file_ + ".part";
        std::string header;
        std::optional<detail::TemporaryFile> made; // on rank 0
        detail::on_all_ranks(control, [&](AgreementList& list) {
            header = header_of(*layout, words, control.size());
            list.add("bytes of the header of the checkpoint", header.size());
            if (is_root) {
                static_cast<void>(made.emplace(temporary));
            }
        });
        detail::on_all_ranks(control, [&](AgreementList&) {
            std::optional<detail::File> opened;
            if (!is_root) {
                static_cast<void>(opened.emplace(temporary, detail::File::Access::write));
            }
            detail::File const& file = is_root ? made->file() : *opened;
            if (is_root) {
                file.write(header.data(), header.size(), 0);
            }
            detail::FileData data{file, header.size(), control};
            for (detail::TensorPart const& part : parts) {
                detail::StoredTensor const& tensor = layout->tensors()[part.tensor];
                on_host.read(tensor, part, [&](detail::TensorPart const& here) {
                    data.write(tensor, here);
                });
            }
            file.sync();
        });
        detail::on_all_ranks(control, [&](AgreementList&) {
            if (is_root) {
                made->replace(file_, folder_);
            }
        });
    }

    [[nodiscard]] std::string header_of(
        detail::ModelLayout const& layout, std::span<std::uint64_t const> words, int world_size
    ) const {
        detail::TrainingState state;
        state.rounds = rounds_;
        state.world_size = static_cast<std::uint64_t>(world_size);
        state.rule = detail::class_name<Rule>();
        state.group_sizes = layout.group_sizes();
        for (Rule const& rule : zero_.rules()) {
            state.rules.push_back(detail::stored_settings(rule));
        }
        std::size_t const parameters = words.size() - layout.tensors().size();
        state.steps.assign(words.begin(), words.begin() + std::ptrdiff_t(parameters));
        for (std::size_t k = 0; k < layout.tensors().size(); ++k) {
            state.hashes.emplace(layout.tensors()[k].name, words[parameters + k]);
        }
        return detail::header_text(file_, {layout.tensors(), detail::metadata_of(state)});
    }

    void read_file(std::string const& name) {
        detail::ControlOver<Comm&> control{join_communicator()};
        std::optional<detail::File> file;
        std::optional<detail::ModelLayout> layout;
        detail::TrainingState state;
        std::vector<Rule> rules;
        std::uint64_t first = 0;
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            wait_for_work();
            for (detail::ShardGroup const& group : zero_.groups()) {
                detail::check_layouts(group); // the state comes in the order of values
            }
            file.emplace(name, detail::File::Access::read);
            std::string const text = read_header(name, *file);
            list.add("hash of the header of the checkpoint", detail::Hash{}.add(text).value());
            first = detail::length_bytes + text.size();
            detail::FileHeader const header =
                detail::HeaderParser{name, file->bytes() - first}.parse(text);
            state = detail::MetadataReader{name, header.metadata}.state();
            rules = rules_of(name, state);
            layout.emplace(layout_by(name, rules));
            layout->place_as(name, header);
            check(name, state, *layout);
        });
        detail::FileData data{*file, first, control};
        check_hashes(name, control, *layout, state, data);
        detail::on_all_ranks(control, [&](AgreementList&) {
            zero_.resume(rules, state.steps);
            std::vector<detail::TensorPart> parts = layout->kept_state();
            for (detail::TensorPart const& part : layout->values()) {
                parts.push_back(part);
            }
            for (detail::TensorPart const& part : parts) {
                detail::StoredTensor const& tensor = layout->tensors()[part.tensor];
                on_host.write(tensor, part, [&](detail::TensorPart const& here) {
                    data.read(tensor, here);
                });
            }
            detail::device_of(join_communicator()).finish(); // the engine's stream sees the values
        });
        rounds_ = state.rounds;
    }

    [[nodiscard]] std::string read_header(std::string const& name, detail::File const& file) const {
        std::uint64_t const bytes = file.bytes();
        std::string start(bytes < detail::length_bytes ? 0 : detail::length_bytes, '\0');
        file.read(start.data(), start.size(), 0);
        std::string text(detail::header_length(name, start, bytes), '\0');
        file.read(text.data(), text.size(), detail::length_bytes);
        return text;
    }

    [[nodiscard]] std::vector<Rule>
    rules_of(std::string const& name, detail::TrainingState const& state) const {
        if (state.rule != detail::class_name<Rule>()) {
            detail::refuse_file(
                name, "its rule is ", state.rule, ", but expected is ", detail::class_name<Rule>()
            );
        }
        std::vector<Rule> rules{zero_.rules().begin(), zero_.rules().end()};
        if (state.rules.size() != rules.size()) {
            detail::refuse_file(
                name,
                "it is of another model: it has ",
                state.rules.size(),
                " groups, but expected are ",
                rules.size()
            );
        }
        for (std::size_t k = 0; k < rules.size(); ++k) {
            detail::set_settings(name, k, state.rules[k], rules[k]);
            detail::check_rule(rules[k]);
        }
        return rules;
    }

    void check(
        std::string const& name,
        detail::TrainingState const& state,
        detail::ModelLayout const& layout
    ) const {
        auto const sizes = layout.group_sizes();
        std::size_t const parameters = layout.own_steps().size();
        if (state.group_sizes != sizes || state.steps.size() != parameters) {
            detail::refuse_file(
                name,
                "it is of another model: its groups have ",
                state.group_sizes,
                " parameters and it has steps of ",
                state.steps.size(),
                ", but expected are groups of ",
                sizes
            );
        }
        for (detail::StoredTensor const& tensor : layout.tensors()) {
            if (!state.hashes.contains(tensor.name)) {
                detail::refuse_file(name, "it has no hash of tensor ", tensor.name);
            }
        }
    }

    /// Each rank reads an equal share of each tensor.
    void check_hashes(
        std::string const& name,
        detail::ControlCommunicator& control,
        detail::ModelLayout const& layout,
        detail::TrainingState const& state,
        detail::FileData& data
    ) const {
        std::vector<std::uint64_t> hashes(layout.tensors().size());
        detail::on_all_ranks(control, [&](AgreementList&) {
            auto const ranks = static_cast<std::size_t>(control.size());
            auto const rank = static_cast<std::size_t>(control.rank());
            for (std::size_t k = 0; k < hashes.size(); ++k) {
                detail::StoredTensor const& tensor = layout.tensors()[k];
                std::size_t const share = (tensor.numel() + ranks - 1) / ranks;
                std::size_t const begin = (std::min)(rank * share, tensor.numel());
                std::size_t const end = (std::min)(begin + share, tensor.numel());
                hashes[k] = data.hash(tensor, begin, end - begin);
            }
        });
        control.sum(hashes);
        for (std::size_t k = 0; k < hashes.size(); ++k) { // alike on all ranks
            std::string const& tensor = layout.tensors()[k].name;
            if (hashes[k] != state.hashes.at(tensor)) {
                detail::refuse_file(
                    name,
                    "tensor ",
                    tensor,
                    " has hash ",
                    detail::hex_of(hashes[k]),
                    ", but expected is ",
                    detail::hex_of(state.hashes.at(tensor)),
                    ": the file is damaged"
                );
            }
        }
    }

    ShardedOptimizer<Comm, Rule>& zero_;
    std::string file_;
    std::string folder_;
    CheckpointOptions options_;
    std::uint64_t rounds_ = 0;
    JoinState state_;
};

template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&) -> Checkpoint<Comm, Rule>;
template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&, CheckpointOptions)
    -> Checkpoint<Comm, Rule>;

}} // namespace joinable::v0

// ---- joinable/checkpoint.hpp

/// @file
/// Checkpoints of sharded trainings in the safetensors layout. Needs nlohmann_json. Includes
/// <joinable/zero.hpp>.
