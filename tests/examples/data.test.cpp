// SPDX-License-Identifier: BSL-1.0
#include "../../examples/train_text/data.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>

namespace {

using train_text::Corpus;

/// A folder that is removed in the end.
class Folder {
public:
    Folder()
        : path_{std::filesystem::temp_directory_path() / ("corpus." + std::to_string(getpid()))} {
        std::filesystem::remove_all(path_);
        std::filesystem::create_directories(path_);
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    Folder(Folder const&) = delete;
    Folder& operator=(Folder const&) = delete;

    [[nodiscard]] std::string path() const { return path_.string(); }

    /// Writes a text that is not the same as another file's.
    void write(std::string_view name, std::size_t bytes) const {
        std::string text{name};
        text.resize(bytes, '.');
        write_bytes(name, text);
    }
    void write_bytes(std::string_view name, std::string const& text) const {
        std::filesystem::create_directories((path_ / name).parent_path());
        std::ofstream{path_ / name} << text;
    }
    /// Nothing can follow this one, not even root.
    void link_to_itself(std::string_view name) const {
        std::filesystem::create_directories((path_ / name).parent_path());
        std::filesystem::create_symlink(path_ / name, path_ / name);
    }
    /// Reading this one fails, also for root.
    void link_to_what_cannot_be_read(std::string_view name) const {
        std::filesystem::create_symlink("/proc/self/mem", path_ / name);
    }

private:
    std::filesystem::path path_;
};

std::size_t bytes_of(Corpus const& corpus) {
    return corpus.training_bytes() + corpus.held_out().size();
}

std::vector<std::string> names_of(Corpus const& corpus) {
    std::vector<std::string> names;
    for (auto const& file : corpus.files()) {
        names.push_back(file.path);
    }
    return names;
}

} // namespace

TEST_CASE("a tree that grows does not make a limited corpus read more, nor anything else") {
    Folder const tree;
    for (int i = 0; i < 100; ++i) {
        tree.write("a/" + std::to_string(i), static_cast<std::size_t>(200 + 10 * i));
    }
    Corpus const before{{tree.path()}, 20'000};
    CHECK(bytes_of(before) == 20'000);

    for (int i = 0; i < 100; ++i) {
        tree.write("b/huge/" + std::to_string(i), 100'000);
    }
    tree.link_to_what_cannot_be_read("b/unreadable");
    Corpus const after{{tree.path()}, 20'000};
    CHECK(bytes_of(after) == 20'000);
    CHECK(names_of(after) == names_of(before));
    CHECK(after.held_out() == before.held_out());
    CHECK_THROWS_AS((Corpus{{tree.path()}, 0}), train_text::InputError); // everything is read
}

TEST_CASE("one huge file of a folder gives a limited corpus no more than a 16th") {
    Folder const tree;
    tree.write("a", 5'000'000);
    for (int i = 0; i < 100; ++i) {
        tree.write("b/" + std::to_string(i), 500);
    }
    Corpus const corpus{{tree.path()}, 16'000};
    CHECK(corpus.files().front().text.size() == 1000);
    CHECK(bytes_of(corpus) == 16'000);
}

TEST_CASE("a limited corpus gives up on a tree of files without text") {
    Folder const tree;
    tree.write("a", 100);
    tree.write("b", 100);
    for (int i = 0; i < 2000; ++i) {
        tree.write_bytes("c/" + std::to_string(i), "");
    }
    tree.link_to_what_cannot_be_read("d");
    Corpus const corpus{{tree.path()}, 1'000'000};
    CHECK(bytes_of(corpus) == 200);
}

TEST_CASE("files that are given share the limit") {
    Folder const tree;
    tree.write("a", 5000);
    tree.write("b", 300);
    tree.write("c", 5000);
    Corpus const corpus{{tree.path() + "/a", tree.path() + "/b", tree.path() + "/c"}, 3000};
    CHECK(bytes_of(corpus) == 1000 + 300 + 1000);
}

TEST_CASE("without a limit everything is read, but a folder that links back is not walked twice") {
    Folder const tree;
    tree.write("a/b", 70'000);
    tree.write("a/c", 70'000);
    std::filesystem::create_directory_symlink(tree.path(), tree.path() + "/a/again");
    Corpus const corpus{{tree.path()}, 0};
    CHECK(bytes_of(corpus) == 140'000);
}

TEST_CASE("a link to itself is named, wherever it lies, and a hidden one is left out") {
    for (char const* const name : {"link", "a/link", "c/CMakeCache.txt"}) {
        Folder const tree;
        tree.write("text/a", 100);
        tree.write("text/b", 100);
        tree.link_to_itself(".link");
        CHECK(bytes_of({{tree.path()}, 0}) == 200);
        tree.link_to_itself(name);
        std::string const link = tree.path() + "/" + name;
        std::string const text = link + ": cannot be read (Too many levels of symbolic links)";
        for (std::string const& path : {tree.path(), link}) {
            CHECK_THROWS_WITH_AS(
                (Corpus{{path}, 0}), doctest::Contains(text.c_str()), train_text::InputError
            );
        }
    }
}

TEST_CASE("a folder that may be listed but not searched is named" * doctest::skip(geteuid() == 0)) {
    Folder const tree;
    tree.write("a/b", 100);
    std::filesystem::permissions(tree.path() + "/a", std::filesystem::perms::owner_read);
    std::string const text = tree.path() + "/a/";
    for (std::string const& path : {tree.path(), text}) {
        CHECK_THROWS_WITH_AS(
            (Corpus{{path}, 0}), doctest::Contains(text.c_str()), train_text::InputError
        );
    }
    std::filesystem::permissions(tree.path() + "/a", std::filesystem::perms::owner_all);
}

TEST_CASE("ranks still have different amounts of a limited corpus") {
    Folder const tree;
    for (int i = 0; i < 100; ++i) {
        tree.write(std::to_string(i), static_cast<std::size_t>(100 + 37 * (i % 11)));
    }
    Corpus const corpus{{tree.path()}, 8'000};
    std::size_t all = 0;
    std::vector<std::size_t> sizes;
    for (int rank = 0; rank < 4; ++rank) {
        sizes.push_back(corpus.dealt_to(rank, 4).size());
        all += sizes.back();
    }
    CHECK(all == corpus.training_bytes());
    CHECK(*std::min_element(sizes.begin(), sizes.end()) > 0);
    CHECK(
        *std::min_element(sizes.begin(), sizes.end()) <
        *std::max_element(sizes.begin(), sizes.end())
    );
}
