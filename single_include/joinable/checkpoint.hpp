// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <concepts>
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
#include <system_error>
#include <tuple>
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

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/file_limit.hpp

#ifndef JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1
#define JOINABLE_COMMUNICATOR_FILE_LIMIT_HPP_PART_1

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace joinable { inline namespace v0 { namespace detail {

/// Whether this process may give no file so many bytes: the system would kill it by SIGXFSZ. Other systems than Linux
/// are not asked.
[[nodiscard]] inline bool exceeds_file_limit([[maybe_unused]] std::uint64_t bytes) noexcept {
#if defined(__linux__)
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
#else
    return false;
#endif
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
        if (bytes != 0 && exceeds_file_limit(at + bytes)) {
            errno = EFBIG;
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

/// A tensor in a file. Complex numbers are pairs of reals in a last dimension of extent 2; the metadata
/// say which tensors are such.
struct StoredTensor {
    std::string name;
    DType dtype = DType::f32; ///< not complex
    Shape extents;
    std::uint64_t begin = 0; ///< first of its bytes in the data
    std::uint64_t end = 0;
    bool is_complex = false; ///< `extents` end with the 2 parts

    [[nodiscard]] std::size_t numel() const { return joinable::numel(extents); }
};

struct FileHeader {
    std::vector<StoredTensor> tensors; ///< in any order
    std::map<std::string, std::string> metadata;
};

/// The "format" of a file that a Checkpoint wrote.
inline constexpr std::string_view checkpoint_format = "joinable checkpoint";

/// Whether a Checkpoint wrote the file; other tools mark no complex numbers.
[[nodiscard]] inline bool is_ours(FileHeader const& header) {
    auto const format = header.metadata.find("format");
    return format != header.metadata.end() && format->second == checkpoint_format;
}

/// The key of the metadata that says that a tensor is complex.
[[nodiscard]] inline std::string mark_of_complex(std::string_view tensor) {
    return concat("parts of ", tensor);
}

inline constexpr std::size_t length_bytes = 8; ///< before the header
inline constexpr std::uint64_t max_header_bytes =
    100'000'000; ///< the limit of the format's own library

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
            entry["dtype"] = row_of(tensor.dtype).stored;
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
        std::string const word = dtype.is_string() ? dtype.get<std::string>() : std::string{};
        auto const* const found = std::find_if( // no complex one, whose parts come first
            std::begin(dtype_table),
            std::end(dtype_table),
            [&](DTypeRow const& row) { return row.stored == word; }
        );
        if (found == std::end(dtype_table)) {
            refuse(
                "tensor ",
                name,
                " is of dtype ",
                dtype.dump(),
                word.starts_with("F8")
                    ? ", but numbers of 8 bits have no DType; store F16 or wider ones"
                    : ", which is none of this library"
            );
        }
        tensor.dtype = static_cast<DType>(found - std::begin(dtype_table));
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

// ---- joinable/checkpoint/detail/model_layout.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A tensor of a model besides its parameters, on this rank.
struct KeptTensor {
    enum class Kind {
        same, ///< on all ranks: one of them writes it
        own,  ///< each rank has one; of a file of W ranks, rank r reads that of rank r mod W
        summed ///< each rank has one; in a file for W ranks, that of rank r is added to that of rank r mod W
    };
    Kind kind;
    std::string name; ///< with a rank's number behind it, if each has one
    AnyView view;

    /// The tensors of a file of `writers` ranks that rank `rank` of `ranks` reads.
    [[nodiscard]] std::vector<std::size_t>
    read_by(std::size_t rank, std::size_t ranks, std::size_t writers) const {
        if (kind != Kind::summed) {
            return {kind == Kind::same ? 0 : rank % writers};
        }
        std::vector<std::size_t> all;
        for (; rank < writers; rank += ranks) {
            all.push_back(rank);
        }
        return all;
    }
};

/// A parameter is named by its index, if it has no name.
[[nodiscard]] inline std::string
stored_name(ParameterList const& parameters, std::size_t i, std::size_t first = 0) {
    std::string name{parameters[i].name()};
    return name.empty() ? std::to_string(first + i) : name;
}

/// All of it, in the order of a file.
[[nodiscard]] inline std::vector<KeptTensor> kept_tensors(SavedModel const& model) {
    std::vector<KeptTensor> kept;
    for (std::size_t i = 0; i < model.buffers.size(); ++i) {
        kept.push_back({KeptTensor::Kind::own, concat("buffers/", i), model.buffers[i]});
    }
    for (std::size_t i = 0; i < model.attached.size(); ++i) {
        kept.push_back({KeptTensor::Kind::same, concat("state/", i), model.attached[i]});
    }
    for (ReductionTensor const& tensor : model.reduction.tensors) {
        kept.push_back(
            {tensor.is_same ? KeptTensor::Kind::same : KeptTensor::Kind::summed,
             concat(stored_name(model.parameters, tensor.parameter), "/", tensor.name),
             AnyView{tensor.data, tensor.dtype, tensor.extents, tensor.strides, tensor.device}}
        );
    }
    return kept;
}

/// The tensors of a model and its optimizer, whichever rank has them: for each parameter its value,
/// then the state of its rule, then the master. A value is named as its parameter, or by its index.
/// State is named by that name, a slash and its own name.
class ModelLayout {
public:
    using Names = std::span<std::string_view const>; ///< of a rule

    /// `names` are the state names of each group's rule, `kept` other tensors, which `writers` ranks write.
    /// @throws ContractViolation  two tensors would have one name.
    ModelLayout(
        std::string_view file,
        std::span<ShardGroup const> groups,
        std::vector<Names> const& names,
        std::vector<KeptTensor> kept,
        std::size_t writers
    )
        : groups_{groups}, kept_{std::move(kept)}, writers_{writers} {
        for (std::size_t k = 0; k < groups.size(); ++k) {
            append(groups[k], names[k]);
        }
        for (KeptTensor& tensor : kept_) {
            bool const is_complex = detail::is_complex(tensor.view.dtype());
            tensor.view = as_reals(tensor.view);
            first_of_kept_.push_back(tensors_.size());
            bool const is_one = tensor.kind == KeptTensor::Kind::same;
            for (std::size_t rank = 0; rank < (is_one ? 1 : writers); ++rank) {
                std::string name = is_one ? tensor.name : concat(tensor.name, "/", rank);
                tensors_.push_back({std::move(name), tensor.view.dtype(), tensor.view.extents()});
                tensors_.back().is_complex = is_complex;
            }
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
        Stored stored = by_name(header);
        for (StoredTensor& tensor : tensors_) {
            place_as(file, tensor, stored, header);
        }
        require_none_left(file, header, stored);
    }
    /// Takes the positions of values alone: of all, which are all that the file has; or of those in `names`, and of other
    /// tensors that are the same on all ranks and named there.
    /// @returns the parts that this rank keeps of them
    /// @throws ContractViolation  as above, or there is no parameter of a name.
    [[nodiscard]] std::vector<TensorPart>
    values_as(std::string_view file, FileHeader const& header, std::span<std::string const> names) {
        Stored stored = by_name(header);
        std::set<std::string_view> unknown{names.begin(), names.end()};
        std::set<std::size_t> placed;
        for (std::size_t const value : first_of_) {
            std::string_view const name = tensors_[value].name;
            if (names.empty() || unknown.erase(name) != 0) {
                place_as(file, tensors_[value], stored, header);
                placed.insert(value);
            }
        }
        std::vector<TensorPart> parts = values();
        std::erase_if(parts, [&](TensorPart const& part) { return !placed.contains(part.tensor); });
        for (std::size_t k = 0; k < kept_.size(); ++k) {
            StoredTensor& tensor = tensors_[first_of_kept_[k]];
            if (kept_[k].kind == KeptTensor::Kind::same && unknown.erase(tensor.name) != 0) {
                place_as(file, tensor, stored, header);
                parts.push_back(whole_of(first_of_kept_[k], kept_[k].view));
            }
        }
        if (!unknown.empty()) {
            refuse_file(
                file,
                "asked for is ",
                *unknown.begin(),
                ", but no parameter is called so, nor a tensor that attach() was given; what each "
                "rank has to itself comes with read()"
            );
        }
        if (names.empty()) {
            require_none_left(file, header, stored);
        }
        return parts;
    }

    /// Whether one of these parts is of the value of parameter `i` of a group.
    [[nodiscard]] bool
    has_value(std::span<TensorPart const> parts, ShardGroup const& group, std::size_t i) const {
        return std::any_of(parts.begin(), parts.end(), [&](TensorPart const& part) {
            return part.tensor == first_of_[group.first + i];
        });
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
    /// The parts of the other tensors that a rank writes. One rank, which `is_source`, writes those that are the same on all.
    [[nodiscard]] std::vector<TensorPart> own_kept(std::size_t rank, bool is_source) const {
        std::vector<TensorPart> parts;
        for (std::size_t k = 0; k < kept_.size(); ++k) {
            bool const is_one = kept_[k].kind == KeptTensor::Kind::same;
            if (is_source || !is_one) {
                parts.push_back(whole_of(first_of_kept_[k] + (is_one ? 0 : rank), kept_[k].view));
            }
        }
        return parts;
    }
    /// Calls f(view, parts) for each other tensor: in this rank's memory, one part for each tensor of the file whose sum it
    /// is. If there is none, it is to be zeros: f(view, {}).
    template <class F>
    void for_each_kept(std::size_t rank, std::size_t ranks, F const& f) const {
        for (std::size_t k = 0; k < kept_.size(); ++k) {
            std::vector<TensorPart> parts;
            for (std::size_t const from : kept_[k].read_by(rank, ranks, writers_)) {
                parts.push_back(whole_of(first_of_kept_[k] + from, kept_[k].view));
            }
            f(kept_[k].view, parts);
        }
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
    using Stored = std::unordered_map<std::string_view, StoredTensor const*>;

    [[nodiscard]] static Stored by_name(FileHeader const& header) {
        Stored stored;
        for (StoredTensor const& tensor : header.tensors) {
            stored.emplace(tensor.name, &tensor);
        }
        return stored;
    }
    static void place_as(
        std::string_view file, StoredTensor& tensor, Stored& stored, FileHeader const& header
    ) {
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
        bool const is_complex = header.metadata.contains(mark_of_complex(tensor.name));
        if (is_complex != tensor.is_complex && (is_complex || is_ours(header))) {
            refuse_file(
                file,
                "it is of another model: tensor ",
                tensor.name,
                tensor.is_complex ? " is complex, but the file has reals of the same extents"
                                  : " has reals, but that of the file is complex"
            );
        }
        tensor.begin = found->second->begin;
        tensor.end = found->second->end;
        stored.erase(found);
    }
    static void
    require_none_left(std::string_view file, FileHeader const& header, Stored const& stored) {
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
            std::string const name = stored_name(group.parameters, i, group.first);
            first_of_.push_back(tensors_.size());
            tensors_.push_back({name, value.dtype(), value.extents()});
            tensors_.back().is_complex = group.parameters[i].is_complex();
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
        // If all ranks have the whole value, a share is one run of the file; otherwise one run of
        // this rank's memory.
        TensorPart part = whole_of(first_of_[group.first + i], value);
        if (group.shards_values()) {
            part.order = dense_strides(value.extents(), value.strides());
        }
        return part;
    }
    [[nodiscard]] static TensorPart whole_of(std::size_t tensor, AnyView const& view) {
        return {
            tensor,
            static_cast<std::byte*>(view.data()),
            0,
            view.strides(),
            row_major_strides(view.extents()),
            0,
            view.numel()
        };
    }

    std::span<ShardGroup const> groups_;
    std::vector<StoredTensor> tensors_;
    std::vector<std::size_t> first_of_; ///< position of each parameter's value
    std::vector<KeptTensor> kept_;
    std::size_t writers_;
    std::vector<std::size_t> first_of_kept_; ///< position of each one's first
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

/// The settings of a reduction as texts. One within another one has its name behind the other one's.
[[nodiscard]] inline RuleSettings settings_of_reduction(AgreementList const& list) {
    RuleSettings settings;
    for (AgreementList::Item const& item : list.items()) {
        auto const [place, is_new] = settings.emplace(item.label, item.value);
        if (!is_new) {
            place->second += concat(" of ", item.value);
        }
    }
    return settings;
}

/// Returns the counts that a file has for a reduction.
/// @throws ContractViolation  the file is of another reduction, or of other settings: the text names the first one.
[[nodiscard]] inline std::vector<std::uint64_t> counts_of_reduction(
    std::string_view file,
    RuleSettings const& stored,
    RuleSettings const& own,
    std::vector<ReductionCount> const& counted
) {
    constexpr std::string_view none = "none";
    auto const text = [&](RuleSettings const& settings, std::string const& label) {
        auto const found = settings.find(label);
        return found == settings.end() ? none : std::string_view{found->second};
    };
    std::string const name = "reduction";
    if (text(stored, name) != text(own, name)) {
        refuse_file(
            file,
            "its reduction is ",
            text(stored, name),
            ", but expected is ",
            text(own, name),
            "; only one that is as when the file was written has a use for what it left out"
        );
    }
    std::vector<std::uint64_t> counts(counted.size());
    RuleSettings all = stored;
    all.insert(own.begin(), own.end());
    for (auto const& setting : all) {
        std::string const& label = setting.first;
        auto const count =
            std::find_if(counted.begin(), counted.end(), [&](ReductionCount const& c) {
                return c.label == label;
            });
        bool const is_count = count != counted.end();
        auto* const to =
            reinterpret_cast<std::byte*>(counts.data() + (is_count ? count - counted.begin() : 0));
        bool const fits = is_count ? write_number<std::uint64_t>(text(stored, label), to)
                                   : text(stored, label) == text(own, label);
        if (!fits) {
            refuse_file(
                file,
                "the setting ",
                label,
                " of its reduction is ",
                text(stored, label),
                ", but expected is ",
                is_count ? std::string_view{"a number"} : text(own, label)
            );
        }
    }
    return counts;
}

}}} // namespace joinable::v0::detail

// ---- joinable/checkpoint/detail/training_state.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The contents of a checkpoint besides tensors.
struct TrainingState {
    std::uint64_t rounds = 0;
    std::uint64_t world_size = 0;                ///< ranks that wrote it
    std::string rule;                            ///< the name of the class
    std::vector<RuleSettings> rules;             ///< of the groups
    std::vector<std::uint64_t> group_sizes;      ///< parameters of each group
    std::vector<std::uint64_t> steps;            ///< of each parameter
    RuleSettings reduction;                      ///< its name and settings, if it has state
    std::vector<std::uint64_t> order;            ///< of the parameters in its buckets
    std::map<std::string, std::uint64_t> hashes; ///< of each tensor, by name
    std::vector<std::string> complex;            ///< names of tensors, to be written
};

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

/// Before the label of a setting of the reduction.
inline constexpr std::string_view prefix_of_reduction = "reduction: ";

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
    for (auto const& [label, value] : state.reduction) {
        metadata.emplace(concat(prefix_of_reduction, label), value);
    }
    if (!state.order.empty()) {
        metadata.emplace("order of buckets", listed(state.order));
    }
    for (auto const& [name, hash] : state.hashes) {
        metadata.emplace("hash of " + name, hex_of(hash));
    }
    for (std::string const& name : state.complex) {
        metadata.emplace(mark_of_complex(name), "real, imaginary");
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
        state.reduction = settings(std::string{prefix_of_reduction});
        if (metadata_.contains("order of buckets")) {
            state.order = numbers("order of buckets");
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

// ---- joinable/reduction/reduce.hpp

#ifndef JOINABLE_REDUCTION_REDUCE_HPP_PART_1
#define JOINABLE_REDUCTION_REDUCE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A function from an index to a value, or none. Refers to the given function.
template <class T>
class Numbered {
public:
    Numbered() = default;
    template <class Function>
    Numbered(std::size_t number, Function const& function) noexcept
        : size_{number}, function_{&function}, call_{[](void const* called, std::size_t i) {
              return (*static_cast<Function const*>(called))(i);
          }} {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] T operator[](std::size_t i) const { return call_(function_, i); }

private:
    std::size_t size_ = 0;
    void const* function_ = nullptr;
    T (*call_)(void const*, std::size_t) = nullptr;
};
/// The addresses of all ranks' inputs, or of the outputs.
using Places = Numbered<std::byte*>;
/// The factors by which inputs are multiplied before they are added. May be empty.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. The bits
/// do not depend on which rank computes them or on how the work was divided. There is at least one
/// input and one output, and is_reducible(dtype, op). An output may be one of the inputs; otherwise they do not overlap. With
/// factors it is a sum of floating-point or complex numbers, each multiplied and rounded first. 16-bit numbers
/// are multiplied as floats.
void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors = {},
    InstructionSet set = instruction_set()
);

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/checkpoint/checkpoint.hpp

#if !defined(__linux__)
#error "<joinable/checkpoint.hpp> needs the files of Linux; elsewhere save zero.state()"
#endif

namespace joinable { inline namespace v0 {

/// Options of a Checkpoint. The same on every rank.
struct CheckpointOptions {
    std::size_t every = 1; ///< a file is written in every `every`-th round that syncs
};

namespace detail {

/// The rule of a training whose optimizer the checkpoint does not have.
struct NoRule {
    static std::span<std::string_view const> state_names() noexcept { return {}; }
};

/// Stands for a sharded optimizer where a model is saved alone: all values are as if they were frozen.
template <class Comm>
class NoOptimizer {
public:
    NoOptimizer(Comm& comm, JoinState& state) : comm_{comm}, state_{state} {}

    void list(ParameterList parameters) {
        groups_ = std::vector<ShardGroup>(1);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            groups_[0].frozen.push_back(i);
        }
        groups_[0].steps.resize(parameters.size());
        groups_[0].parameters = std::move(parameters);
    }

    [[nodiscard]] std::vector<ShardGroup> const& groups() const noexcept { return groups_; }
    [[nodiscard]] std::vector<NoRule> const& rules() const noexcept { return rules_; }
    [[nodiscard]] std::vector<NoRule> const& settings() const noexcept { return rules_; }
    static void resume(std::vector<NoRule> const&, std::span<std::uint64_t const>) noexcept {}
    static void take_settings(Round const&) noexcept {}
    [[nodiscard]] static bool writes_state() noexcept { return true; }
    template <class Loads>
    static void reload_masters(Loads const&) noexcept {}
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }

private:
    Comm& comm_;
    JoinState& state_;
    std::vector<ShardGroup> groups_;
    std::vector<NoRule> rules_{1};
};
template <class Comm, class Rule>
using OptimizerIn = std::
    conditional_t<std::is_same_v<Rule, NoRule>, NoOptimizer<Comm>, ShardedOptimizer<Comm, Rule>&>;

template <class J>
concept saves_model = requires(J& joinable) {
    { joinable.saved() } -> std::same_as<detail::SavedModel>;
};
template <class Comm, class Rule>
std::type_identity<Rule> rule_in(ShardedOptimizer<Comm, Rule> const&);
template <class J>
concept gives_rule = requires(J& joinable) { detail::rule_in(joinable); };

/// Which of the participants are the model and the optimizer of a checkpoint.
template <class... Js>
struct Saved {
    using Model = void;
    using Rule = NoRule;
};
template <class J, class... Js>
struct Saved<J, Js...> : Saved<Js...> {};
template <gives_rule J, class... Js>
struct Saved<J, Js...> : Saved<Js...> {
    using Optimizer = J;
    using Rule = typename decltype(detail::rule_in(std::declval<J&>()))::type;
};
template <saves_model J, class... Js>
struct Saved<J, Js...> : Saved<Js...> {
    using Model = J;
};

} // namespace detail

/// Saves a training in one file: values and state of a ZeroRedundancyOptimizer or a ShardedDataParallel, settings of
/// the rules and step counts, and of a DistributedDataParallel its buffers, attached state, and what its reduction keeps
/// (<joinable/compression.hpp>). Each rank writes what it owns. Any number of ranks can read it, with either partition.
///
/// @code
/// joinable::Checkpoint save{zero, "model.safetensors", {.every = 100}};
/// if (std::filesystem::exists("model.safetensors")) {
///     save.read();                              // then skip the first save.rounds() batches: each round syncs
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
/// under "NAME/master". What each rank has to itself has the rank's number behind its name: "buffers/0/2" is the first
/// buffer of rank 2, and "NAME/residual/2" what the reduction has left out of its gradients. If another number of ranks W
/// reads them, rank r gets the buffers of rank r mod (ranks of the file), and the residuals of rank r are added to those
/// of rank r mod W. What is the same on all ranks is there once: attached state as "state/0", and "NAME/warm_start".
/// A reduction with such state must be in the file, with the settings that it has here. attach() adds what else a
/// training has: averages of values, a loss scale, the state of a random generator. The settings of a rule are stored as texts under the labels of its
/// agree_on(), which it needs; what that leaves out is not in the file. A LocalOptimizer with state_names() has them in
/// its settings(). All ranks must see one file system. The new file is written beside the old
/// one as "FILE.part" and replaces it when it is complete and on the disk, so killing the training
/// at any time leaves a complete file. Groups of ranks that save different models need a file each. Memory of a device goes through the host's,
/// one tensor at a time, while the host waits. Only one training may write a file at a time. The caller
/// attaches what ZeroOptions::shared and the buffers of a ShardedDataParallel hold, and saves the position in the inputs.
template <class Comm, class Rule, class Model>
class Checkpoint {
    static constexpr bool has_model = !std::is_void_v<Model>;
    static constexpr bool has_optimizer = !std::is_same_v<Rule, detail::NoRule>;

    static_assert(models_communicator<Comm>());
    static_assert(
        has_model || has_optimizer,
        "Checkpoint: give it the sharded optimizer, or participants(...) of a DistributedDataParallel, a sharded "
        "optimizer, or both"
    );
    static_assert(
        UpdateRule<Rule> || detail::keeps_state_with_shard<Rule> || !has_optimizer,
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
        : Checkpoint{zero, nullptr, file, options} {}

    /// A DistributedDataParallel, a sharded optimizer, or one of each, of one communicator. With both, the optimizer
    /// has all parameters of the model, and the file the optimizer's values. A model alone may be stepped by anything:
    /// attach_state() says what of that is to be in the file. In a guard a rank that trains on writes values and attached
    /// state, outside of one rank 0. All must outlive it. Local.
    /// @throws ContractViolation  `every` is 0, or there are two communicators.
    template <class... Js>
    Checkpoint(
        Participants<Js...> saved, std::filesystem::path const& file, CheckpointOptions options = {}
    )
        : Checkpoint{optimizer_of(saved), model_of(saved), file, options} {}

    /// Adds a tensor to the file as `name`, or those of a range as "NAME/0", "NAME/1", ...; they are the same on all
    /// ranks. In a guard a rank that trains on writes them, outside of one rank 0; all ranks read them. Call it on all
    /// ranks, before the first write() or read() that they are for. The tensors are in memory of the communicator's
    /// device and outlive the checkpoint, a named `torch::Tensor` too: give a copy of such a handle if it ends. Local.
    /// @throws ContractViolation  the name is empty or given before, or a tensor is missing, without memory, on another
    ///         device, or its elements share memory; nothing was changed.
    template <class Range>
    void attach(std::string_view name, Range&& tensors) {
        attach(detail::KeptTensor::Kind::same, name, std::forward<Range>(tensors));
    }
    /// The same for tensors that each rank has to itself: that of rank r is "NAME/r", or "NAME/0/r" in a range. If
    /// another number of ranks reads the file, rank r gets those of rank r mod (ranks of the file).
    template <class Range>
    void attach_per_rank(std::string_view name, Range&& tensors) {
        attach(detail::KeptTensor::Kind::own, name, std::forward<Range>(tensors));
    }

    /// Collective, outside a guard. Writes the file now. Each rank brings 64 MiB at a time to the
    /// disk, and the deadline must cover that, for all ranks that write to one disk together. On the
    /// first three errors all ranks throw, and the communicator is usable: a rank that fails throws its
    /// own error, and the others that of the first rank that failed. The old file
    /// stays, with one exception: "cannot sync" the folder means that the new file, which is
    /// complete, has replaced it, but a power loss may bring the old one back.
    /// @throws CommunicationError  a rank cannot write.
    /// @throws ContractViolation  in a guard, two parameters have one name, a rule keeps another
    ///         number of states than when its group was added, or the optimizer lacks a parameter of the model.
    /// @throws Mismatch  settings or rounds() differ between ranks, as after a guard that failed: set
    ///         the settings on all ranks.
    /// @throws what the communicator throws.
    void write() {
        require_outside("write()");
        write_file(0);
    }

    /// Collective, outside a guard. Reads the file: values, state, settings and rounds(). On the
    /// first two errors all ranks throw as in write().
    /// @throws ContractViolation  in a guard, the file is not a complete checkpoint of this model, rule and reduction: the text
    ///         names the first tensor that differs; or the elements of a value come in another order than when it was
    ///         given. Nothing was changed.
    /// @throws Mismatch  ranks read different files or values, or have attached different tensors. Nothing was changed.
    /// @throws CommunicationError  a rank cannot read; what was read so far is kept.
    /// @throws what the communicator throws.
    void read() { read(file_); }
    /// Reads another file; write() keeps its own.
    void read(std::filesystem::path const& from) {
        require_outside("read()");
        read_file(from.string());
    }

    /// Reads values alone, from a safetensors file of any tool, by the names of parameters: all of them, and then the file
    /// has no other tensors; or those in `names`, which may also name what attach() was given, such as buffers. State,
    /// settings and rounds() stay; their masters are read again from them.
    /// Such a file has no hashes: damage to its numbers is not seen. Collective, outside a guard; throws as read() does.
    /// @throws ContractViolation  a dtype or a shape differs, a tensor or a parameter of that name is missing, or the file has
    ///         tensors that the model lacks. Nothing was changed.
    void
    read_values(std::filesystem::path const& from, std::vector<std::string> const& names = {}) {
        require_outside("read_values()");
        read_values_of(from.string(), names);
    }

    /// Counts a round and writes the file in every CheckpointOptions::every-th one. Call it once in
    /// each round that syncs, after the optimizer has stepped. Collective. Throws what write()
    /// throws.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { run(round); });
    }

    /// The number of step() calls, one for each round that syncs, including joined rounds and those of the training that
    /// was read. Where each round syncs, a rank with enough inputs has had this many batches; with
    /// `JoinOptions::sync_every` that many times as many. Local.
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }

    /// Runs the same steps on joined ranks.
    class Hook {
    public:
        using runs_after = labels_of<labels::shards, labels::gradients, labels::step>;

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
    using Optimizer = detail::OptimizerIn<Comm, Rule>;

    template <class Given>
    Checkpoint(
        Given&& zero, Model* model, std::filesystem::path const& file, CheckpointOptions options
    )
        : zero_(std::forward<Given>(zero)), model_{model}, file_{file.string()},
          folder_{file.has_parent_path() ? file.parent_path().string() : "."}, options_{options} {
        if (options.every == 0) {
            throw ContractViolation{
                "CheckpointOptions::every is 0, but a file is written every 1 or more rounds"
            };
        }
        if constexpr (has_model) {
            if (detail::identity_of(model->join_communicator()) !=
                detail::identity_of(zero_.join_communicator())) {
                throw ContractViolation{
                    "Checkpoint: the model and the optimizer have two communicators; make both with one"
                };
            }
        }
    }
    template <class... Js>
    static Model* model_of(Participants<Js...> const& saved) {
        static_assert(
            sizeof...(Js) == std::size_t{has_model} + std::size_t{has_optimizer},
            "Checkpoint: participants(...) are a DistributedDataParallel, a sharded optimizer, or one of each; the "
            "others of a guard have nothing to save"
        );
        if constexpr (has_model) {
            return &std::get<Model&>(saved.joinables);
        } else {
            return nullptr;
        }
    }
    template <class... Js>
    static Optimizer optimizer_of(Participants<Js...> const& saved) {
        if constexpr (has_optimizer) {
            return std::get<typename detail::Saved<Js...>::Optimizer&>(saved.joinables);
        } else {
            auto& model = *model_of(saved);
            return {model.join_communicator(), model.join_state()};
        }
    }
    /// A model that is saved alone may list others than before.
    void list_parameters() {
        if constexpr (!has_optimizer) {
            zero_.list(model_->saved().parameters);
        }
    }
    /// All that the model has besides values, which the optimizer has.
    /// @throws ContractViolation  the optimizer lacks a parameter of the model.
    [[nodiscard]] detail::SavedModel saved_model() {
        if constexpr (has_model) {
            detail::SavedModel saved = model_->saved();
            std::set<void const*> values;
            for (detail::ShardGroup const& group : zero_.groups()) {
                for (AnyParameter const& parameter : group.parameters) {
                    static_cast<void>(values.insert(parameter.value().data()));
                }
            }
            for (std::size_t i = 0; i < saved.parameters.size(); ++i) {
                AnyView const value = saved.parameters[i].value();
                if (value.numel() != 0 && !values.contains(value.data())) {
                    throw ContractViolation{detail::concat(
                        "Checkpoint: the optimizer has no ",
                        detail::describe_parameter(saved.parameters, i),
                        " of the model, so the file would lack it; give the optimizer all parameters"
                    )};
                }
            }
            return saved;
        } else {
            return {};
        }
    }

    void require_outside(std::string_view verb) {
        bool is_inside = detail::session_of(state_) != nullptr ||
                         detail::session_of(zero_.join_state()) != nullptr;
        if constexpr (has_model) {
            is_inside = is_inside || detail::session_of(model_->join_state()) != nullptr;
        }
        if (is_inside) {
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
            write_file(round.buffer_source());
        }
    }

    template <class Rules>
    [[nodiscard]] detail::ModelLayout layout_by(
        std::string const& name,
        Rules const& rules,
        std::vector<detail::KeptTensor> kept,
        std::size_t writers
    ) const {
        std::vector<detail::ModelLayout::Names> names;
        for (auto const& rule : rules) {
            names.emplace_back(rule.state_names());
        }
        return {name, zero_.groups(), names, std::move(kept), writers};
    }

    struct Attached {
        detail::KeptTensor::Kind kind;
        std::string name;
        bool is_range;
        detail::FixedTensors tensors;
    };
    template <class Range>
    void attach(detail::KeptTensor::Kind kind, std::string_view name, Range&& tensors) {
        bool const is_known = std::any_of(attached_.begin(), attached_.end(), [&](auto const& one) {
            return one.name == name;
        });
        if (name.empty() || is_known) {
            throw ContractViolation{
                is_known
                    ? detail::concat(
                          "Checkpoint: ", name, " is attached twice; give it another name"
                      )
                    : "Checkpoint: attach() was given an empty name, which a tensor of a file cannot have"
            };
        }
        constexpr bool is_range = !WritableTensor<Range>;
        TensorList list = detail::tensor_list(std::forward<Range>(tensors));
        attached_.push_back(
            {kind,
             std::string{name},
             is_range,
             {std::move(list), "attached tensor", detail::device_of(join_communicator()).id()}}
        );
    }
    /// All that the file has besides parameters and their state. Ranks attach the same.
    [[nodiscard]] std::vector<detail::KeptTensor>
    kept_with(detail::SavedModel const& model, AgreementList& list) {
        std::vector<detail::KeptTensor> kept = detail::kept_tensors(model);
        std::vector<std::string> texts;
        for (Attached& one : attached_) {
            std::vector<AnyView> const& views = one.tensors.views();
            for (std::size_t i = 0; i < views.size(); ++i) {
                std::string name = one.is_range ? detail::concat(one.name, "/", i) : one.name;
                texts.push_back(detail::concat(
                    name,
                    one.kind == detail::KeptTensor::Kind::own ? " per rank, " : ", ",
                    detail::to_text(views[i])
                ));
                kept.push_back({one.kind, std::move(name), views[i]});
            }
        }
        list.add("attached tensors", texts);
        return kept;
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

    /// `source` writes what is the same on all ranks that have not joined.
    void write_file(int source) {
        detail::ControlOver<Comm&> control{join_communicator()};
        bool const is_root = control.rank() == 0;
        bool const is_source = control.rank() == (has_optimizer ? 0 : source);
        std::optional<detail::ModelLayout> layout;
        detail::SavedModel model;
        std::vector<detail::TensorPart> parts;
        std::vector<std::uint64_t> words; // steps of each parameter, hash of each tensor
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            bool const writes_state = zero_.writes_state(); // before this rank may throw
            list_parameters();
            detail::agree_on_rules(list, zero_.rules());
            list.begin_section("checkpoints differ: ");
            list.add("rounds", rounds_);
            wait_for_work();
            detail::check_before_save(zero_.groups(), zero_.rules());
            model = saved_model();
            auto const rank = static_cast<std::size_t>(control.rank());
            auto const ranks = static_cast<std::size_t>(control.size());
            layout.emplace(layout_by(file_, zero_.rules(), kept_with(model, list), ranks));
            layout->place();
            auto const add = [&](std::vector<detail::TensorPart> const& more) {
                parts.insert(parts.end(), more.begin(), more.end());
            };
            words = layout->own_steps();
            std::size_t const parameters = words.size();
            if (writes_state) {
                add(layout->own_state());
                add(layout->own_values(is_source));
            } else { // another group of shards has the same
                std::fill(words.begin(), words.end(), 0);
            }
            add(layout->own_kept(rank, control.rank() == source));
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
            header = header_of(*layout, words, control.size(), model);
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
        detail::ModelLayout const& layout,
        std::span<std::uint64_t const> words,
        int world_size,
        detail::SavedModel const& model
    ) const {
        detail::TrainingState state;
        state.rounds = rounds_;
        state.world_size = static_cast<std::uint64_t>(world_size);
        state.rule = detail::class_name<Rule>();
        state.group_sizes = layout.group_sizes();
        for (Rule const& rule : zero_.rules()) {
            state.rules.push_back(detail::stored_settings(rule));
        }
        state.reduction = detail::settings_of_reduction(model.settings);
        state.order = model.order;
        std::size_t const parameters = words.size() - layout.tensors().size();
        state.steps.assign(words.begin(), words.begin() + std::ptrdiff_t(parameters));
        for (std::size_t k = 0; k < layout.tensors().size(); ++k) {
            detail::StoredTensor const& tensor = layout.tensors()[k];
            state.hashes.emplace(tensor.name, words[parameters + k]);
            if (tensor.is_complex) {
                state.complex.push_back(tensor.name);
            }
        }
        return detail::header_text(file_, {layout.tensors(), detail::metadata_of(state)});
    }

    void prepare_to_read() {
        list_parameters();
        wait_for_work();
        for (detail::ShardGroup const& group : zero_.groups()) {
            detail::check_layouts(group); // values and state come in this order
        }
    }

    void read_file(std::string const& name) {
        detail::ControlOver<Comm&> control{join_communicator()};
        std::optional<detail::StoredFile> file;
        std::optional<detail::ModelLayout> layout;
        detail::TrainingState state;
        std::vector<detail::SettingsOf<Rule>> rules;
        detail::SavedModel model;
        std::vector<std::uint64_t> counts; // of the reduction
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            prepare_to_read();
            file.emplace(name).agree_on(list);
            detail::FileHeader const header = file->header();
            state = detail::MetadataReader{name, header.metadata}.state();
            rules = rules_of(name, state);
            model = saved_model();
            counts = counts_of(name, state, model);
            layout.emplace(layout_by(name, rules, kept_with(model, list), state.world_size));
            layout->place_as(name, header);
            check(name, state, *layout);
        });
        detail::FileData data = file->data(control);
        check_hashes(name, control, *layout, state, data);
        detail::on_all_ranks(control, [&](AgreementList&) {
            zero_.resume(rules, state.steps);
            std::vector<detail::TensorPart> parts = layout->kept_state();
            for (detail::TensorPart const& part : layout->values()) {
                parts.push_back(part);
            }
            read_parts(*layout, parts, on_host, data);
            layout->for_each_kept(
                static_cast<std::size_t>(control.rank()),
                static_cast<std::size_t>(control.size()),
                [&](AnyView const& to, std::span<detail::TensorPart const> from) {
                    read_sum(*layout, to, from, on_host, data);
                }
            );
            if constexpr (has_model) {
                for (std::size_t k = 0; k < counts.size(); ++k) {
                    *model.reduction.counts[k].value = counts[k];
                }
                model_->resume(state.order);
            }
            detail::device_of(join_communicator()).finish(); // the engine's stream sees the values
        });
        rounds_ = state.rounds;
    }

    void read_values_of(std::string const& name, std::vector<std::string> const& names) {
        detail::ControlOver<Comm&> control{join_communicator()};
        std::optional<detail::StoredFile> file;
        std::optional<detail::ModelLayout> layout;
        std::vector<detail::TensorPart> parts;
        detail::on_all_ranks(control, [&](AgreementList& list) {
            prepare_to_read();
            file.emplace(name).agree_on(list);
            list.add("names of values to read", names);
            layout.emplace(layout_by(name, zero_.rules(), kept_with({}, list), 1));
            parts = layout->values_as(name, file->header(), names);
        });
        detail::on_all_ranks(control, [&](AgreementList&) {
            detail::PartsOnHost on_host{detail::device_of(join_communicator())};
            detail::FileData data = file->data(control);
            read_parts(*layout, parts, on_host, data);
            zero_.reload_masters([&](detail::ShardGroup const& group, std::size_t i) {
                return layout->has_value(parts, group, i);
            });
            detail::device_of(join_communicator()).finish(); // the engine's stream sees the values
        });
    }
    static void read_parts(
        detail::ModelLayout const& layout,
        std::span<detail::TensorPart const> parts,
        detail::PartsOnHost& on_host,
        detail::FileData& data
    ) {
        for (detail::TensorPart const& part : parts) {
            detail::StoredTensor const& tensor = layout.tensors()[part.tensor];
            on_host.write(tensor, part, [&](detail::TensorPart const& here) {
                data.read(tensor, here);
            });
        }
    }

    /// Reads the sum of tensors of a file, in rank order. Sums of several, or of none, are dense.
    void read_sum(
        detail::ModelLayout const& layout,
        AnyView const& to,
        std::span<detail::TensorPart const> parts,
        detail::PartsOnHost& on_host,
        detail::FileData& data
    ) {
        std::size_t const bytes = to.numel() * size_of(to.dtype());
        if (parts.size() == 1 || bytes == 0) {
            read_parts(layout, parts, on_host, data);
            return;
        }
        Device& device = detail::device_of(join_communicator());
        Arena const sum = device.allocate_staging(bytes); // zeroed
        std::vector<std::byte> summand(parts.empty() ? 0 : bytes);
        for (std::size_t k = 0; k < parts.size(); ++k) {
            detail::TensorPart part = parts[k];
            part.data = k == 0 ? sum.data() : summand.data();
            data.read(layout.tensors()[part.tensor], part);
            if (k == 0) {
                continue;
            }
            std::byte* const both[] = {sum.data(), summand.data()};
            detail::reduce_to(
                to.dtype(),
                ReduceOp::sum,
                {2, [&](std::size_t i) { return both[i]; }},
                {1, [&](std::size_t i) { return both[i]; }},
                to.numel()
            );
        }
        device.upload(sum.data(), to.data(), bytes);
        device.download(to.data(), sum.data(), bytes); // waits until it is there
    }

    /// The file's values of the counts of the model's reduction.
    /// @throws ContractViolation  it is of another reduction, or its buckets are of other parameters.
    [[nodiscard]] std::vector<std::uint64_t> counts_of(
        std::string const& name, detail::TrainingState const& state, detail::SavedModel const& model
    ) const {
        if (state.world_size == 0 || state.world_size > detail::max_world_size) {
            detail::refuse_file(
                name,
                "its world size is ",
                state.world_size,
                ", but expected is 1 to ",
                detail::max_world_size
            );
        }
        std::vector<std::uint64_t> counts = detail::counts_of_reduction(
            name,
            state.reduction,
            detail::settings_of_reduction(model.settings),
            model.reduction.counts
        );
        if constexpr (has_model) {
            if (!state.order.empty() && !model_->is_order(state.order)) {
                detail::refuse_file(
                    name,
                    "it is of another model: its buckets have parameters ",
                    state.order,
                    ", which are not those that the model trains"
                );
            }
        }
        return counts;
    }

    [[nodiscard]] std::vector<detail::SettingsOf<Rule>>
    rules_of(std::string const& name, detail::TrainingState const& state) {
        if (state.rule != detail::class_name<Rule>()) {
            detail::refuse_file(
                name, "its rule is ", state.rule, ", but expected is ", detail::class_name<Rule>()
            );
        }
        std::vector<detail::SettingsOf<Rule>> rules = zero_.settings();
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

    Optimizer zero_;
    Model* model_;
    std::string file_;
    std::string folder_;
    CheckpointOptions options_;
    std::vector<Attached> attached_;
    std::uint64_t rounds_ = 0;
    JoinState state_;
};

template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&) -> Checkpoint<Comm, Rule>;
template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&, CheckpointOptions)
    -> Checkpoint<Comm, Rule>;
template <class... Js>
Checkpoint(Participants<Js...>, std::filesystem::path const&, CheckpointOptions = {}) -> Checkpoint<
    std::remove_cvref_t<
        decltype(std::get<0>(std::declval<Participants<Js...>&>().joinables).join_communicator())>,
    typename detail::Saved<Js...>::Rule,
    typename detail::Saved<Js...>::Model>;

}} // namespace joinable::v0

// ---- joinable/checkpoint.hpp

/// @file
/// Checkpoints of trainings in the safetensors layout. Needs nlohmann_json. Includes
/// <joinable/zero.hpp>.
