// SPDX-License-Identifier: BSL-1.0
// What a checkpoint asks of the system when it writes.
#include <joinable/checkpoint/detail/file.hpp>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/folder.hpp>

#include <joinable/agreement/control.hpp>
#include <joinable/checkpoint/detail/tensor_part.hpp>
#include <joinable/communicator/self.hpp>

namespace {

std::string* log_of_calls = nullptr; // a letter each

} // namespace

/// Instead of the system's.
extern "C" int fdatasync(int file) {
    if (log_of_calls != nullptr) {
        *log_of_calls += 's';
        return 0; // the disk need not work
    }
    return static_cast<int>(::syscall(SYS_fdatasync, file));
}

namespace {

using joinable::DType;
using joinable_tests::contents_of;
using joinable_tests::Folder;
using namespace joinable::detail;

struct Noting : joinable::SelfCommunicator {
    static std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        return deadline;
    }
    static void keep_alive() { *log_of_calls += 'a'; }
};

TEST_CASE("a rank that writes much syncs between pieces, and then says that it is alive") {
    Folder const folder;
    File const file{folder.file("data"), File::Access::create};
    Noting comm;
    ControlOver<Noting&> control{comm};
    std::vector<float> values(std::size_t{8} << 20U); // 32 MiB
    StoredTensor const tensor{"values", DType::f32, {values.size()}};
    auto* const data_of = reinterpret_cast<std::byte*>(values.data());
    TensorPart const part{0, data_of, 0, {1}, {1}, 0, values.size()};
    std::string log;
    log_of_calls = &log;
    FileData data{file, 0, control};
    for (int i = 0; i < 5; ++i) { // to one place, which takes no room
        data.write(tensor, part);
    }
    log_of_calls = nullptr;
    CHECK(log == "aaaaaaasaaaaaaaasaaaaa");
}

TEST_CASE("a folder that cannot be synced does not keep a file from replacing another") {
    Folder const folder;
    std::string const old = folder.file("old");
    joinable_tests::write_contents(old, "old");
    TemporaryFile made{folder.file("new")};
    made.file().write("new", 3, 0);
    CHECK_THROWS_WITH_AS(
        (File{"/proc", File::Access::folder}.sync()),
        "checkpoint: cannot sync /proc: Invalid argument",
        joinable::CommunicationError
    );
    made.replace(old, "/proc"); // whose file system cannot sync folders
    CHECK(contents_of(old) == "new");
    CHECK(folder.names() == std::vector<std::string>{"old"});
}

} // namespace
