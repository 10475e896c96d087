// SPDX-License-Identifier: BSL-1.0
#pragma once

// Finds text files, holds some out for the test, and deals the others to ranks.

#include <joinable/join.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "options.hpp"

namespace train_text {

struct File {
    std::string path;
    Text text;
};

inline std::uint64_t hash_of(std::string_view bytes) {
    std::uint64_t hash = 0xcbf29ce484222325U; // FNV-1a: the same on every machine
    for (char const byte : bytes) {
        hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3U;
    }
    return hash;
}

inline std::string_view view_of(Text const& text) {
    return {reinterpret_cast<char const*>(text.data()), text.size()};
}

class Corpus {
public:
    /// Reads files, and folders recursively, in the order of names. In folders it leaves out hidden
    /// entries, build folders, generated files, files that are not text, and texts that it has seen
    /// before.
    ///
    /// `limit_bytes` bounds what is read; 0 reads everything. Each path gets an equal part of it.
    /// No file gives more than a 16th of its folder's part, so that the text comes from many files
    /// and ranks still have different amounts.
    Corpus(std::vector<std::string> const& paths, std::size_t limit_bytes) {
        for (std::string const& path : paths) {
            Allowance left = Allowance::part_of(limit_bytes, paths.size());
            std::filesystem::file_status const status = status_of(path);
            if (!std::filesystem::exists(status)) {
                throw InputError{path + ": no such file or folder; check the path"};
            }
            if (std::filesystem::is_directory(status)) {
                left.bytes_per_file = std::max<std::size_t>(1, left.bytes / 16);
                add_folder(path, left);
            } else {
                add_file(path, true, left);
            }
        }
        if (files_.empty()) {
            throw InputError{
                "no text found in " + paths.front() + "; give files or folders with text"
            };
        }
        std::sort(files_.begin(), files_.end(), [](File const& a, File const& b) {
            return a.path < b.path;
        });
        hold_out();
        if (held_out_.empty() || training_bytes() == 0) {
            throw InputError{
                "too little text in " + paths.front() +
                ": some is needed to train on, and some to test with; give longer or more files"
            };
        }
    }

    [[nodiscard]] std::vector<File> const& files() const { return files_; }
    [[nodiscard]] Text const& held_out() const { return held_out_; }
    [[nodiscard]] std::size_t training_bytes() const {
        std::size_t bytes = 0;
        for (File const& file : files_) {
            bytes += file.text.size();
        }
        return bytes;
    }

    /// Deals whole files in turn, so that ranks have different amounts.
    [[nodiscard]] Text dealt_to(int rank, int ranks) const {
        Text text;
        for (File const& file : joinable::shard(files_, {rank, ranks})) {
            text.insert(text.end(), file.text.begin(), file.text.end());
        }
        return text;
    }

    /// Equal parts of all the text; less than one byte per rank is left over.
    [[nodiscard]] Text equal_part(int rank, int ranks) const {
        Text all;
        for (File const& file : files_) {
            all.insert(all.end(), file.text.begin(), file.text.end());
        }
        std::size_t const part = all.size() / static_cast<std::size_t>(ranks);
        auto const begin = all.begin() + static_cast<std::ptrdiff_t>(part) * rank;
        return {begin, begin + static_cast<std::ptrdiff_t>(part)};
    }

private:
    [[noreturn]] static void refuse(std::filesystem::path const& path, std::error_code error) {
        throw InputError{
            path.string() + ": cannot be read (" + error.message() +
            "); check it, and the permissions of its folder"
        };
    }

    /// The status of what a path leads to. A link to itself leads nowhere that can be known.
    static std::filesystem::file_status status_of(std::filesystem::path const& path) {
        std::error_code error;
        std::filesystem::file_status const status = std::filesystem::status(path, error);
        if (status.type() == std::filesystem::file_type::none) {
            refuse(path, error);
        }
        return status;
    }

    static bool is_hidden(std::filesystem::path const& path) {
        return path.filename().string().starts_with('.');
    }

    static bool is_left_out(std::filesystem::path const& folder) {
        return folder.filename() == "build" || folder.filename() == "single_include" ||
               exists(status_of(folder / "CMakeCache.txt"));
    }

    /// The amount that may still be read.
    struct Allowance {
        std::size_t bytes;
        std::size_t bytes_per_file;
        std::size_t files;

        static Allowance part_of(std::size_t limit_bytes, std::size_t paths) {
            constexpr auto unbounded = std::numeric_limits<std::size_t>::max();
            if (limit_bytes == 0) {
                return {unbounded, unbounded, unbounded};
            }
            std::size_t const bytes = std::max<std::size_t>(1, limit_bytes / paths);
            return {bytes, bytes, 2000}; // empty and binary files cost time, too
        }
        [[nodiscard]] bool is_used_up() const { return bytes == 0 || files == 0; }
    };

    /// The sorted entries of a folder, so that a limit ends the walk at the same place on every
    /// machine.
    static std::vector<std::filesystem::directory_entry>
    entries_of(std::filesystem::path const& folder) {
        std::error_code error;
        std::vector<std::filesystem::directory_entry> entries;
        auto entry = std::filesystem::directory_iterator{folder, error};
        for (; !error && entry != std::filesystem::end(entry); entry.increment(error)) {
            entries.push_back(*entry);
        }
        if (error) {
            refuse(folder, error);
        }
        std::sort(entries.begin(), entries.end());
        return entries;
    }

    void add_folder(std::filesystem::path const& folder, Allowance& left) {
        for (auto const& entry : entries_of(folder)) {
            if (left.is_used_up()) {
                return;
            }
            if (is_hidden(entry.path())) {
                continue;
            }
            std::filesystem::file_status const status = status_of(entry.path());
            std::error_code error;
            if (is_directory(status)) { // a link may lead back
                if (!entry.is_symlink(error) && !is_left_out(entry.path())) {
                    add_folder(entry.path(), left);
                }
            } else if (is_regular_file(status)) {
                add_file(entry.path(), false, left);
            }
        }
    }

    static Text read(std::filesystem::path const& path, std::size_t most) {
        std::ifstream stream{path, std::ios::binary};
        Text text;
        std::vector<char> block(1 << 16);
        do {
            std::size_t const wanted = std::min(block.size(), most - text.size());
            stream.read(block.data(), static_cast<std::streamsize>(wanted));
            text.insert(text.end(), block.begin(), block.begin() + stream.gcount());
        } while (stream && text.size() < most);
        if (!stream && !stream.eof()) { // not opened, or an error while reading
            throw InputError{path.string() + ": cannot be read; check its permissions"};
        }
        return text;
    }

    void add_file(std::filesystem::path const& path, bool is_asked_for, Allowance& left) {
        Text text = read(path, std::min(left.bytes, left.bytes_per_file));
        --left.files;
        bool const is_text = std::find(text.begin(), text.end(), 0) == text.end();
        if (is_asked_for && (text.empty() || !is_text)) {
            throw InputError{
                path.string() + (text.empty() ? ": is empty" : ": is not text") +
                "; leave it out or give another"
            };
        }
        if (!text.empty() && is_text && seen_.insert(hash_of(view_of(text))).second) {
            left.bytes -= text.size();
            files_.push_back({path.string(), std::move(text)});
        }
    }

    /// Holds out about a tenth of the files, chosen by their content, so that a new file moves no
    /// other. A single file loses its last tenth.
    void hold_out() {
        if (files_.size() == 1) {
            Text& text = files_.front().text;
            auto const cut = text.end() - static_cast<std::ptrdiff_t>(text.size() / 10);
            held_out_.assign(cut, text.end());
            text.erase(cut, text.end());
            return;
        }
        std::vector<File> kept;
        for (File& file : files_) {
            bool const is_first = &file == &files_.front(); // training and test both need some text
            bool const is_last_chance = held_out_.empty() && &file == &files_.back();
            if ((hash_of(view_of(file.text)) % 10 == 0 && !is_first) || is_last_chance) {
                held_out_.insert(held_out_.end(), file.text.begin(), file.text.end());
            } else {
                kept.push_back(std::move(file));
            }
        }
        files_ = std::move(kept);
    }

    std::vector<File> files_;
    Text held_out_;
    std::set<std::uint64_t> seen_;
};

/// The positions of a text in the order of an epoch, in batches.
inline std::vector<std::vector<std::size_t>>
make_batches(std::size_t bytes, std::size_t batch_size, joinable::Shuffle shuffle) {
    auto const positions = joinable::permutation(bytes, shuffle);
    std::vector<std::vector<std::size_t>> batches;
    for (std::size_t begin = 0; begin < bytes; begin += batch_size) {
        std::size_t const end = std::min(bytes, begin + batch_size);
        batches.emplace_back(
            positions.begin() + static_cast<std::ptrdiff_t>(begin),
            positions.begin() + static_cast<std::ptrdiff_t>(end)
        );
    }
    return batches;
}

} // namespace train_text
