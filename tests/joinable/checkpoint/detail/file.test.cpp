// SPDX-License-Identifier: BSL-1.0
// What a checkpoint asks of the system when it writes.
#include <joinable/checkpoint/detail/file.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/folder.hpp>

#include <joinable/checkpoint/checkpoint.hpp>
#include <joinable/checkpoint/detail/tensor_part.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/optimizer.hpp>

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

TEST_CASE(
    "a rank says that it is alive each 8 MiB that it hashes or writes, in any order of elements"
) {
    constexpr std::size_t rows = 1024;
    constexpr std::size_t columns = 3 * 1024;
    Folder const folder;
    File const file{folder.file("data"), File::Access::create};
    Noting comm;
    ControlOver<Noting&> control{comm};
    std::vector<double> values(rows * columns); // 24 MiB
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<double>(i);
    }
    StoredTensor const tensor{"values", DType::f64, {rows, columns}};
    auto* const data_of = reinterpret_cast<std::byte*>(values.data());
    auto const log_of = [&](auto const& f) {
        std::string log;
        log_of_calls = &log;
        f();
        log_of_calls = nullptr;
        return log;
    };
    auto const hash_of = [&](TensorPart const& part) {
        std::uint64_t sum = 0;
        CHECK(log_of([&] {
                  DeadlineRenewal renewal{control};
                  sum = hash_part(tensor, part, renewal);
              }) == "aaa");
        return sum;
    };
    TensorPart const in_order{0, data_of, 0, {columns, 1}, {columns, 1}, 0, values.size()};
    CHECK(hash_of(in_order) == hash_elements(data_of, 0, values.size(), DType::f64));
    TensorPart const by_columns{0, data_of, 0, {1, rows}, {1, rows}, 0, values.size()};
    TensorPart few = by_columns; // it goes through the others'
    few.size = values.size() / 2;
    TensorPart rest = few;
    rest.begin = few.size;
    std::uint64_t const hash = hash_of(by_columns);
    CHECK(hash == hash_of(few) + hash_of(rest));
    FileData data{file, 0, control};
    CHECK(log_of([&] { data.write(tensor, by_columns); }) == "aaa");
    File const reading{folder.file("data"), File::Access::read};
    FileData written{reading, 0, control};
    CHECK(log_of([&] { written.read(tensor, by_columns); }) == "aaa");
    CHECK(log_of([&] { CHECK(written.hash(tensor, 0, values.size()) == hash); }) == "aaa");
    StoredTensor const small{"small", DType::f64, {rows}};
    TensorPart const part{0, data_of, 0, {1}, {1}, 0, rows}; // 8 KiB
    CHECK(log_of([&] {
              for (int i = 0; i < 2048; ++i) {
                  data.write(small, part);
              }
          }) == "aa");
}

TEST_CASE("a checkpoint renews deadlines while it hashes a large parameter, too") {
    Folder const folder;
    Noting comm;
    struct Param {
        std::vector<float> value;
        std::vector<float> grad;
    };
    std::vector<float> const values(std::size_t{4} << 20U); // 16 MiB
    std::vector<Param> params{{values, values}};
    joinable::ZeroRedundancyOptimizer zero{comm, params, joinable::Sgd{}};
    joinable::Checkpoint save{zero, folder.file("model")};
    std::string log;
    log_of_calls = &log;
    save.write();
    log_of_calls = nullptr;
    CHECK(log == "aaaa"); // 2 while it hashes, 2 while it writes
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
