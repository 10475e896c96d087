// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace joinable_tests {

/// A folder for the files of a test.
class Folder {
public:
    Folder() {
        std::string path = (std::filesystem::temp_directory_path() / "joinable.XXXXXX").string();
        if (::mkdtemp(path.data()) == nullptr) {
            throw std::runtime_error{"a test cannot make a folder"};
        }
        path_ = path;
    }
    Folder(Folder const&) = delete;
    Folder& operator=(Folder const&) = delete;
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    [[nodiscard]] std::string file(std::string const& name) const {
        return (path_ / name).string();
    }
    /// The names of what lies in it.
    [[nodiscard]] std::vector<std::string> names() const {
        std::vector<std::string> found;
        for (auto const& entry : std::filesystem::directory_iterator{path_}) {
            found.push_back(entry.path().filename().string());
        }
        std::sort(found.begin(), found.end());
        return found;
    }

private:
    std::filesystem::path path_;
};

inline std::string contents_of(std::string const& name) {
    std::ifstream file{name, std::ios::binary};
    return {std::istreambuf_iterator<char>{file}, {}};
}
inline void write_contents(std::string const& name, std::string const& contents) {
    std::ofstream{name, std::ios::binary} << contents;
}

} // namespace joinable_tests
