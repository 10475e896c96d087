// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/shared_handle.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <csignal>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/forked.hpp>
#include <support/process_ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>

namespace {

using namespace joinable_tests;
using joinable::CommunicationError;
using joinable::ContractViolation;
using joinable::ProcessCommunicator;
using joinable::shared_buffer;
using joinable::SharedBuffer;
using joinable::SharedHandle;
using namespace std::chrono_literals;

std::ptrdiff_t entries_of(char const* folder) {
    return std::distance(
        std::filesystem::directory_iterator{folder}, std::filesystem::directory_iterator{}
    );
}
std::ptrdiff_t open_files() {
    return entries_of("/proc/self/fd");
}
std::ptrdiff_t own_threads() {
    return entries_of("/proc/self/task");
}
/// Whether the system knows a socket of this number.
bool has_socket(SharedHandle const& handle) {
    std::string const name = "@joinable-1-" + std::to_string(handle.words[0]);
    std::ifstream sockets{"/proc/net/unix"};
    for (std::string line; std::getline(sockets, line);) {
        if (line.ends_with(name)) {
            return true;
        }
    }
    return false;
}

/// What open() says; empty if it succeeds.
template <class T = int>
std::string refusal_of(SharedHandle const& handle, std::chrono::nanoseconds patience = 60s) {
    try {
        static_cast<void>(SharedBuffer<T>::open(handle, patience));
    } catch (joinable::Error const& error) {
        return error.what();
    } catch (ContractViolation const& error) {
        return error.what();
    }
    return {};
}

template <class Comm>
void check_handles_between_ranks(Comm& comm) {
    auto const world = static_cast<std::size_t>(comm.size());
    auto const rank = static_cast<std::size_t>(comm.rank());
    std::size_t const count = 3000 * world + 1;
    std::optional<SharedBuffer<std::uint64_t>> buffer;
    SharedHandle handle;
    int const maker = comm.size() - 1;
    if (comm.rank() == maker) { // nobody else knows of it yet
        buffer = shared_buffer<std::uint64_t>(count);
        handle = buffer->handle();
    }
    joinable::broadcast(comm, handle, maker).wait();
    if (comm.rank() != maker) {
        buffer = SharedBuffer<std::uint64_t>::open(handle, 60s);
    }
    CHECK(buffer->size() == count);
    for (std::size_t i = rank; i < count; i += world) {
        (*buffer)[i] = 7 * i + rank;
    }
    comm.barrier();
    if (comm.rank() == maker && world > 1) {
        buffer.reset(); // the others keep it
    }
    comm.barrier();
    if (buffer) {
        bool are_right = true;
        for (std::size_t i = 0; i < count; ++i) {
            are_right = are_right && (*buffer)[i] == 7 * i + i % world;
        }
        CHECK(are_right);
    }
    if (world > 1) {
        CHECK(refusal_of<std::uint64_t>(handle).find("no process offers it") != std::string::npos);
        CHECK_FALSE(has_socket(handle));
    }
    comm.barrier();
    if (world > 1 && comm.rank() == 0) { // a rank that has opened it can offer it, too
        handle = buffer->handle();
    }
    if (world > 1) {
        joinable::broadcast(comm, handle, 0).wait();
        auto const again = SharedBuffer<std::uint64_t>::open(handle, 60s);
        CHECK(again[count - 1] == 7 * (count - 1) + (count - 1) % world);
    }
    comm.barrier();
}

TEST_CASE("a handle that travels by a message gives other processes the same elements") {
    run_process_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_handles_between_ranks(comm); });
    run_named_ranks({1, 2, 4}, [](auto& comm) { check_handles_between_ranks(comm); });
}

TEST_CASE("a buffer that all ranks made has handles, too, of a tensor and of one that was moved") {
    run_process_ranks({2, 3}, [](ProcessCommunicator& comm) {
        auto made = shared_buffer<float>(comm, 10);
        SharedHandle handle = made.handle();
        SharedBuffer<float> const moved{std::move(made)};
        CHECK(moved.handle().words == handle.words); // the same offer
        joinable::broadcast(comm, handle, 1).wait();
        auto const opened = SharedBuffer<float>::open(handle);
        opened[static_cast<std::size_t>(comm.rank())] = 1.5F;
        comm.barrier();
        CHECK(moved[0] + moved[1] == 3.0F);
        comm.barrier();
    });
}

TEST_CASE("a handle of nothing, of the heap or of other elements is refused in a sentence") {
    run_ranks({2}, [](joinable::ThreadCommunicator& comm) {
        auto const buffer = shared_buffer<int>(comm, 3);
        CHECK_THROWS_WITH_AS(
            (void)buffer.handle(),
            "SharedBuffer::handle(): the elements are in the heap of this process; make the buffer by "
            "shared_buffer<T>(count), or over process ranks",
            ContractViolation
        );
    });
    joinable::SelfCommunicator alone;
    CHECK_THROWS_AS((void)shared_buffer<int>(alone, 3).handle(), ContractViolation);
    CHECK_THROWS_WITH_AS(
        (void)shared_buffer<int>(0).handle(),
        "SharedBuffer::handle(): the buffer has no elements, which no process can open",
        ContractViolation
    );
    CHECK_THROWS_WITH_AS(
        (void)SharedBuffer<int>::open(SharedHandle{}),
        "SharedBuffer::open(): the handle is empty; give one that handle() has made",
        ContractViolation
    );
    auto const buffer = shared_buffer<int>(3);
    CHECK_THROWS_WITH_AS(
        (void)SharedBuffer<double>::open(buffer.handle()),
        "SharedBuffer::open(): expected a handle of elements of 8 bytes, but its elements have 4: open it "
        "with the element type with which the buffer was made",
        ContractViolation
    );
    SharedHandle longer = buffer.handle();
    longer.words[3] = 4;
    CHECK(refusal_of(longer).find("12 bytes, too few for 4 elements") != std::string::npos);
    longer.words[3] = std::uint64_t{1} << 62U;
    CHECK(refusal_of(longer).find("too few") != std::string::npos);
}

TEST_CASE("a wrong secret is refused, and the right one still accepted") {
    auto const buffer = shared_buffer<int>(3);
    SharedHandle const handle = buffer.handle();
    CHECK(handle.words[1] != 0); // once in 2^64 times it is
    CHECK(handle.words[2] != 0);
    CHECK(handle.words[1] != handle.words[2]);
    for (std::size_t const word : {1U, 2U}) {
        SharedHandle wrong = handle;
        wrong.words[word] ^= 1U << 31U;
        CHECK(refusal_of(wrong).find("its secret is another one") != std::string::npos);
    }
    auto const other = shared_buffer<int>(3);
    CHECK(other.handle().words[1] != handle.words[1]);
    CHECK(refusal_of(handle).empty());
}

TEST_CASE(
    "only a buffer whose handle was asked for has a thread and a socket, and it ends with it" *
    doctest::skip(joinable::detail::has_thread_sanitizer) // which has a thread of its own
) {
    // A thread that was joined may be listed for a moment, here and below.
    REQUIRE(joinable::detail::count_other_threads(std::chrono::minutes{1}) == 0);
    std::ptrdiff_t const threads = own_threads();
    std::ptrdiff_t const files = open_files();
    std::optional<SharedBuffer<int>> buffer = shared_buffer<int>(3);
    CHECK(own_threads() == threads);
    SharedHandle const handle = buffer->handle();
    CHECK(own_threads() == threads + 1);
    CHECK(buffer->handle().words == handle.words);
    CHECK(own_threads() == threads + 1);
    std::optional<SharedBuffer<int>> opened = SharedBuffer<int>::open(handle);
    CHECK(own_threads() == threads + 1);
    CHECK(has_socket(handle));
    buffer.reset();
    CHECK_FALSE(has_socket(handle));
    (*opened)[2] = 5;
    opened.reset();
    wait_until([&] { return own_threads() == threads; });
    CHECK(open_files() == files);
}

/// Another program that offers a buffer of 100 times 42, until it is killed.
class Maker {
public:
    Maker() {
        std::array<int, 2> ends{};
        REQUIRE(::pipe2(ends.data(), O_CLOEXEC) == 0);
        process_ = processes_.start([&] {
            auto const buffer = shared_buffer<int>(100);
            std::fill(buffer.begin(), buffer.end(), 42);
            SharedHandle const made = buffer.handle();
            CHECK(::write(ends[1], &made, sizeof made) == sizeof made);
            ::pause();
        });
        REQUIRE(::read(ends[0], &handle, sizeof handle) == sizeof handle);
        ::close(ends[0]);
        ::close(ends[1]);
    }
    void stop() const {
        ::kill(process_, SIGSTOP);
        ::waitpid(process_, nullptr, WUNTRACED);
    }
    void kill() {
        ::kill(process_, SIGKILL);
        CHECK(processes_.wait() == SIGKILL);
    }

    SharedHandle handle;

private:
    Processes processes_;
    pid_t process_ = 0;
};

TEST_CASE("nothing is left of a maker that was killed but what others have opened") {
    Maker maker;
    auto const opened = SharedBuffer<int>::open(maker.handle);
    CHECK(has_socket(maker.handle));
    maker.kill();
    CHECK_FALSE(has_socket(maker.handle));
    CHECK(opened[99] == 42);
    CHECK(refusal_of(maker.handle).find("no process offers it") != std::string::npos);
    CHECK(refusal_of(opened.handle()).empty());
}

TEST_CASE("a maker that is stopped makes open() throw in time, and one that dies at once") {
    Maker maker;
    maker.stop();
    auto const start = std::chrono::steady_clock::now();
    CHECK(
        refusal_of(maker.handle, 50ms).find("did not answer within 0.05 s: it may be stopped") !=
        std::string::npos
    );
    CHECK(std::chrono::steady_clock::now() - start >= 50ms);
    CHECK(refusal_of(maker.handle, -1s).find("did not answer") != std::string::npos);
    std::string text;
    std::jthread waits{[&] { text = refusal_of(maker.handle, std::chrono::hours{1}); }};
    std::this_thread::sleep_for(20ms); // whether it waits by now or not, it ends
    maker.kill();
    waits.join();
    CHECK(text.find("no process offers it") != std::string::npos);
}

TEST_CASE("processes that connect and say nothing keep no other one waiting") {
    Maker const maker;
    std::vector<joinable::detail::Socket> silent;
    joinable::detail::AbstractAddress const at{maker.handle.words[0]};
    for (int i = 0; i < 100; ++i) { // more than are heard at the same time
        silent.push_back(joinable::detail::local_socket());
        wait_until([&] { return ::connect(silent.back().handle(), at.get(), at.size) == 0; });
        CHECK((i % 10 != 0 || refusal_of(maker.handle).empty()));
    }
    CHECK(refusal_of(maker.handle).empty());
}

TEST_CASE("another user is refused on both sides") {
    if (::geteuid() != 0) {
        return; // nobody else may become another user
    }
    Maker const maker;
    CHECK(succeeds_in_fork([&] {
        CHECK(::seteuid(65'534) == 0);
        CHECK(
            refusal_of(maker.handle)
                .find("belongs to user 0, and this process runs as user 65534") != std::string::npos
        );
        // A program that does not ask itself, and has learnt the secret.
        auto const socket = joinable::detail::local_socket();
        joinable::detail::AbstractAddress const at{maker.handle.words[0]};
        CHECK(::connect(socket.handle(), at.get(), at.size) == 0);
        joinable::detail::FileSecret const secret{maker.handle.words[1], maker.handle.words[2]};
        CHECK(socket.send(std::as_bytes(std::span{secret})) == sizeof secret);
        joinable::detail::FileMessage answer;
        wait_until([&] { return answer.receive(socket) > 0; });
        CHECK(answer.verdict == joinable::detail::FileVerdict::other_user);
        CHECK(answer.file().number() < 0);
    }));
}

TEST_CASE("another network namespace, as that of another container, is refused") {
    Maker const maker;
    CHECK(succeeds_in_fork([&] {
        if (::unshare(CLONE_NEWNET) == 0) { // where that is allowed
            CHECK(
                refusal_of(maker.handle).find("in the same network namespace") != std::string::npos
            );
        }
    }));
}

TEST_CASE("a process that may open no more files says so, and gets none") {
    Maker const maker;
    CHECK(succeeds_in_fork([&] {
        std::vector<int> taken;
        for (int file = ::dup(0); file >= 0; file = ::dup(0)) {
            taken.push_back(file);
        }
        ::close(taken.back()); // room for the socket
        taken.pop_back();
        std::exception_ptr refused;
        try {
            static_cast<void>(SharedBuffer<int>::open(maker.handle));
        } catch (...) {
            refused = std::current_exception();
        }
        for (int const file : taken) { // a sanitizer needs some to look at what was thrown
            ::close(file);
        }
        REQUIRE(refused);
        CHECK_THROWS_WITH(std::rethrow_exception(refused), doctest::Contains("ulimit -n"));
    }));
}

// Not under a sanitizer: a thread of the parent may have one of its locks at fork, which stays locked.
TEST_CASE(
    "a forked process makes an offer of its own, and ends none of its parent's" *
    doctest::skip(under_sanitizer)
) {
    auto const buffer = shared_buffer<int>(3);
    SharedHandle const handle = buffer.handle();
    CHECK(succeeds_in_fork([&] {
        SharedHandle const own = buffer.handle();
        CHECK(own.words[0] != handle.words[0]);
        auto const opened = SharedBuffer<int>::open(own);
        opened[1] = 17;
        auto& ended = const_cast<SharedBuffer<int>&>(buffer);
        ended = SharedBuffer<int>{};
        CHECK(refusal_of(own).find("no process offers it") != std::string::npos);
    }));
    CHECK(buffer[1] == 17);
    CHECK(refusal_of(handle).empty());
    // Its socket is not a copy of its children either.
    Processes children;
    std::optional<SharedBuffer<int>> ended = shared_buffer<int>(3);
    SharedHandle const of_ended = ended->handle();
    pid_t const child = children.start([] { ::pause(); });
    ended.reset();
    // fork() may return here before the child has closed its copy.
    wait_until([&] { return !has_socket(of_ended); });
    ::kill(child, SIGKILL);
    CHECK(children.wait() == SIGKILL);
}

} // namespace
