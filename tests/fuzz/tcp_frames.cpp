// SPDX-License-Identifier: BSL-1.0
// Sends a rank what no rank 0 sends, and rank 0 what no rank sends: both must end with an error of
// joinable, or as if nothing had been wrong. Meant to be built with sanitizers; each case is drawn from
// a number, which is printed when a case fails:
//   fuzz_tcp_frames [--seconds 2] [--seed 1] [--cases N]
#include <joinable/tcp.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <support/draw.hpp>
#include <support/shared.hpp>

namespace {

using namespace joinable::detail;
using namespace std::chrono_literals;
using joinable::DType;
using joinable::FailureKind;
using joinable::ReduceOp;
using joinable_tests::Draw;
using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;

void require(bool is_right, char const* what) {
    if (!is_right) {
        throw std::logic_error{what};
    }
}
void append(Bytes& bytes, std::span<std::byte const> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
}
void append_frame(Bytes& bytes, FrameHeader header, std::span<std::byte const> body = {}) {
    header.bytes = body.size();
    append(bytes, bytes_of(header));
    append(bytes, body);
}
FrameHeader header_of(FrameKind kind, std::uint64_t sequence = 0, std::uint64_t count = 0) {
    FrameHeader header;
    header.kind = kind;
    header.sequence = sequence;
    header.count = count;
    return header;
}

struct Pair {
    Socket near;
    Socket far;
};
Pair connected_pair() {
    int ends[2];
    require(
        ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
        "no socket pair"
    );
    return {Socket{ends[0]}, Socket{ends[1]}};
}

// -- what is right ----------------------------------------------------------------------------------

/// A collective that all ranks run: of 32-bit numbers, small enough for the kernel's buffers.
struct Operation {
    Collective collective;
    int root;
    std::size_t count;

    [[nodiscard]] std::size_t bytes() const {
        return collective == Collective::barrier ? 0 : count * sizeof(std::int32_t);
    }
    [[nodiscard]] Descriptor signature() const {
        bool const is_barrier = collective == Collective::barrier;
        return {
            collective,
            is_barrier ? DType::u8 : DType::i32,
            ReduceOp::sum,
            root,
            is_barrier ? 0 : count
        };
    }
    [[nodiscard]] bool gives(int rank) const {
        return collective == Collective::all_reduce ||
               (collective == Collective::broadcast && root == rank);
    }
    [[nodiscard]] bool gets(int rank) const {
        return collective == Collective::all_reduce ||
               (collective == Collective::broadcast && root != rank);
    }
};
std::vector<Operation> draw_operations(Draw& draw, int size) {
    std::vector<Operation> operations(draw.below(6));
    for (Operation& operation : operations) {
        operation.collective =
            draw.one_of({Collective::all_reduce, Collective::broadcast, Collective::barrier});
        bool const has_root = operation.collective == Collective::broadcast;
        operation.root =
            has_root ? static_cast<int>(draw.below(static_cast<std::size_t>(size))) : 0;
        operation.count = draw.one_in(8) ? 3000 : draw.below(20);
    }
    return operations;
}
Bytes numbers(std::size_t bytes, std::int32_t value) {
    std::vector<std::int32_t> const all(bytes / sizeof value, value);
    Bytes as_bytes;
    append(as_bytes, std::as_bytes(std::span{all}));
    return as_bytes;
}

// -- what is wrong ----------------------------------------------------------------------------------

/// Numbers at which something changes.
std::uint64_t draw_number(Draw& draw) {
    std::uint64_t const near = draw.below(4);
    return draw.one_of<std::uint64_t>(
        {near,
         40 + near,
         16'384 + near,
         65'536 - near,
         std::uint64_t{1} << 30U,
         ~near,
         near << 32U,
         std::uint64_t{1} << 63U}
    );
}
/// One header of a valid stream gets another number in one field, or the stream loses, gets or changes
/// bytes anywhere.
void damage(Draw& draw, Bytes& bytes) {
    if (bytes.empty()) {
        return;
    }
    std::size_t const at = draw.below(bytes.size());
    switch (draw.below(6)) {
    case 0: bytes[at] = static_cast<std::byte>(draw.below(256)); break;
    case 1: bytes.resize(at); break;
    case 2: {
        auto const end =
            bytes.begin() +
            static_cast<std::ptrdiff_t>(at + draw.below((std::min)(bytes.size() - at, 90UL)));
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at), end);
        break;
    }
    case 3: {
        Bytes more(1 + draw.below(90));
        for (std::byte& byte : more) {
            byte = static_cast<std::byte>(draw.below(256));
        }
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), more.begin(), more.end());
        break;
    }
    default: { // the headers that are where one expects them
        std::vector<std::size_t> headers;
        for (std::size_t place = 0; place + sizeof(FrameHeader) <= bytes.size();) {
            headers.push_back(place);
            auto const header = object_at<FrameHeader>(std::span{bytes}.subspan(place));
            if (header.bytes > bytes.size()) {
                break;
            }
            place += sizeof header + static_cast<std::size_t>(header.bytes);
        }
        if (headers.empty()) {
            return;
        }
        std::size_t const place = headers[draw.below(headers.size())];
        auto header = object_at<FrameHeader>(std::span{bytes}.subspan(place));
        switch (draw.below(7)) {
        case 0: header.kind = static_cast<FrameKind>(draw.below(14)); break;
        case 1: header.collective = static_cast<Collective>(draw.below(12)); break;
        case 2: header.root = static_cast<std::int32_t>(draw_number(draw)); break;
        case 3: header.sequence = draw_number(draw); break;
        case 4: header.count = draw_number(draw); break;
        case 5: header.bytes = draw_number(draw); break;
        default: header.consumed = draw_number(draw); break;
        }
        std::memcpy(bytes.data() + place, &header, sizeof header);
    }
    }
}

// -- the side of a rank -----------------------------------------------------------------------------

/// What an honest hub sends to a rank that runs these.
Bytes from_hub(Draw& draw, std::vector<Operation> const& operations, int rank, bool is_odd) {
    Bytes stream;
    append_frame(stream, header_of(FrameKind::start));
    for (std::size_t i = 0; i < operations.size(); ++i) {
        Operation const& operation = operations[i];
        Bytes const body =
            numbers(operation.gets(rank) ? operation.bytes() : 0, static_cast<std::int32_t>(i) + 7);
        append_frame(stream, header_of(FrameKind::result, i), body);
        if (is_odd && draw.one_in(4)) { // for which it did not ask, or did
            std::array<std::int32_t, 2> const ranks{0, static_cast<std::int32_t>(draw.below(5))};
            append_frame(stream, header_of(FrameKind::answer, i), std::as_bytes(std::span{ranks}));
        }
        if (is_odd && draw.one_in(4)) {
            append_frame(stream, header_of(FrameKind::wait, i, draw_number(draw)));
        }
    }
    if (is_odd && draw.one_in(2)) {
        append_frame(
            stream,
            header_of(FrameKind::end),
            packed({FailureKind::mismatch, {0, 1}, std::string(draw.below(100), 'x')})
        );
    }
    return stream;
}

void try_rank(Draw& draw) {
    int const size = static_cast<int>(draw.between(1, 4));
    int const rank = static_cast<int>(draw.below(static_cast<std::size_t>(size)));
    auto const operations = draw_operations(draw, size);
    bool const is_honest = draw.one_in(8);
    Bytes stream = from_hub(draw, operations, rank, !is_honest);
    for (std::size_t i = is_honest ? 0 : draw.between(1, 3); i > 0; --i) {
        damage(draw, stream);
    }
    Pair ends = connected_pair();
    TcpRank side{std::move(ends.far), rank, size, 20ms};
    std::vector<Bytes> buffers; // each its own memory, so that a byte too many is seen
    for (Operation const& operation : operations) {
        buffers.push_back(numbers(operation.bytes(), 1));
    }
    // In two parts: results come before they are asked for, or after. All at once, where the rank would
    // wait for a start.
    FrameHeader const start = header_of(FrameKind::start);
    bool const starts =
        stream.size() >= sizeof start && std::memcmp(stream.data(), &start, sizeof start) == 0;
    std::size_t const early = !starts     ? stream.size()
                              : is_honest ? sizeof start
                                          : draw.between(sizeof start, stream.size());
    std::size_t finished = 0;
    try {
        static_cast<void>(ends.near.send(std::span{stream}.first(early)));
        if (!starts) {
            ends.near.end_sending();
        }
        side.meet("meets");
        for (std::size_t i = 0; i < operations.size(); ++i) {
            Operation const& operation = operations[i];
            joinable::Buffer const buffer{
                buffers[i].data(), operation.signature().count, operation.signature().dtype
            };
            Request request;
            request.signature = operation.signature();
            request.in = operation.gives(rank) ? joinable::ConstBuffer{buffer}
                                               : joinable::ConstBuffer{nullptr, 0, buffer.dtype};
            request.out = buffer;
            side.post(request);
        }
        static_cast<void>(ends.near.send(std::span{stream}.subspan(early)));
        ends.near.end_sending();
        while (finished < operations.size()) {
            switch (is_honest ? 0 : draw.below(8)) {
            case 0: side.finish(finished++); break;
            case 1: finished += side.test(finished) ? 1U : 0U; break;
            case 2: static_cast<void>(side.missing_ranks()); break;
            case 3: side.keep_alive(); break;
            case 4: static_cast<void>(side.is_aborted()); break;
            case 5: side.abort({FailureKind::contract, {rank}, "enough"}); break;
            default: break;
            }
        }
    } catch (joinable::Error const&) { // as it should
    } catch (joinable::ContractViolation const&) {
    }
    if (is_honest) {
        require(finished == operations.size(), "an honest hub was refused");
        for (std::size_t i = 0; i < operations.size(); ++i) {
            std::int32_t const value =
                operations[i].gets(rank) ? static_cast<std::int32_t>(i) + 7 : 1;
            require(buffers[i] == numbers(buffers[i].size(), value), "a wrong result");
        }
    }
    ends.near.close(); // or the rank waits for an answer to its leaving
}

// -- the side of rank 0 -----------------------------------------------------------------------------

/// A connection of a rank to the hub, which checks what comes.
struct RawRank {
    Socket socket;
    Bytes stream;
    std::size_t sent = 0;
    Inbox inbox = {};
    Bytes body = {};
    std::uint64_t results = 0;
    std::uint64_t bytes_of_results = 0;
    bool is_open = true;
    bool is_greeted = false; ///< has read what comes before the frames

    void move(Draw& draw) {
        if (!is_open) {
            return;
        }
        std::size_t const piece = (std::min)(stream.size() - sent, draw.between(1, 5000));
        if (piece != 0) {
            auto const taken = socket.send(std::span{stream}.subspan(sent, piece));
            is_open = taken.has_value();
            sent += taken.value_or(0);
        }
        if (!is_greeted) {
            return;
        }
        bool const goes_on = inbox.read(
            socket,
            [&](FrameHeader const& header, std::uint64_t done) {
                require(
                    header.kind >= FrameKind::start && header.kind <= FrameKind::answer,
                    "the hub sends what no hub sends"
                );
                require(header.bytes <= 100'000, "the hub sends too much");
                return room_in(body, header.bytes, done);
            },
            [&](FrameHeader const& header) {
                if (header.kind == FrameKind::result) {
                    require(header.sequence == results++, "a result at another time");
                    bytes_of_results += header.bytes;
                }
                require(
                    header.kind != FrameKind::end || unpacked_reason(body).has_value(),
                    "an end without a reason"
                );
            }
        );
        is_open = is_open && goes_on;
    }
};

/// What an honest rank sends; one that has waited for its deadline, if it `is_odd`.
Bytes from_rank(Draw& draw, std::vector<Operation> const& operations, int rank, bool is_odd) {
    Bytes stream;
    for (std::size_t i = 0; i < operations.size(); ++i) {
        Operation const& operation = operations[i];
        Descriptor const signature = operation.signature();
        FrameHeader header = header_of(FrameKind::arrival, i, signature.count);
        header.collective = signature.collective;
        header.dtype = signature.dtype;
        header.op = signature.op;
        header.root = signature.root;
        append_frame(stream, header, numbers(operation.gives(rank) ? operation.bytes() : 0, 1));
        if (draw.one_in(4)) {
            append_frame(stream, header_of(FrameKind::keep_alive));
        }
        if (draw.one_in(4)) {
            append_frame(stream, header_of(FrameKind::question, i));
        }
        if (draw.one_in(4)) {
            append_frame(stream, header_of(FrameKind::credit));
        }
        if (is_odd && draw.one_in(8)) {
            std::string_view const text = "waits";
            append_frame(
                stream,
                header_of(FrameKind::overdue, i, draw_number(draw)),
                std::as_bytes(std::span{text})
            );
        }
    }
    return stream;
}

std::uint16_t port_of(Socket const& listener) {
    sockaddr_in at{};
    socklen_t size = sizeof at;
    require(
        ::getsockname(listener.handle(), reinterpret_cast<sockaddr*>(&at), &size) == 0, "no port"
    );
    return ntohs(at.sin_port);
}

void try_hub(Draw& draw) {
    int const size = static_cast<int>(draw.between(1, 4));
    auto const operations = draw_operations(draw, size);
    bool const is_honest = draw.one_in(8);
    TcpJob const job{size, "fuzz", "secret"};
    Socket listener = listen_at("127.0.0.1", 0);
    std::uint16_t const port = port_of(listener);
    Pair ends = connected_pair();
    std::vector<RawRank> ranks;
    ranks.push_back({std::move(ends.near), from_rank(draw, operations, 0, !is_honest)});
    ranks.front().is_greeted = true;
    Hub hub{std::move(listener), std::move(ends.far), job};
    std::jthread const thread{[&] { hub.run(); }};
    for (int rank = 1; rank < size; ++rank) {
        Bytes hello = hello_of(rank, job);
        if (!is_honest && draw.one_in(6)) {
            damage(draw, hello);
        }
        Socket socket = connect_to("127.0.0.1", port, Clock::now() + 10s, rank);
        static_cast<void>(socket.send(hello));
        ranks.push_back({std::move(socket), from_rank(draw, operations, rank, !is_honest)});
        Greeting greeting;
        ranks.back().is_greeted = receive_all(
            ranks.back().socket,
            std::as_writable_bytes(std::span{&greeting, 1}),
            Clock::now() + (is_honest ? 10s : 20ms)
        );
        ranks.back().is_open =
            ranks.back().is_greeted && greeting.verdict == Greeting::Verdict::welcome;
        require(!is_honest || ranks.back().is_open, "an honest rank was turned away");
    }
    for (std::size_t i = is_honest ? 0 : draw.between(1, 3); i > 0; --i) {
        damage(draw, ranks[draw.below(ranks.size())].stream);
    }
    // Until all has been said and, if all of it was right, answered.
    auto const is_answered = [&](RawRank const& rank) {
        return !rank.is_open || rank.results == operations.size();
    };
    auto const end = Clock::now() + (is_honest ? 10s : 5ms);
    bool is_over = false;
    for (int turn = 0; !is_over && (turn < 30 || Clock::now() < end); ++turn) {
        is_over = true;
        for (RawRank& rank : ranks) {
            rank.move(draw);
            is_over = is_over && rank.sent == rank.stream.size() && is_answered(rank);
        }
    }
    for (std::size_t rank = 0; is_honest && rank < ranks.size(); ++rank) {
        std::uint64_t bytes = 0;
        for (Operation const& operation : operations) {
            bytes += operation.gets(static_cast<int>(rank)) ? operation.bytes() : 0;
        }
        require(ranks[rank].results == operations.size(), "honest ranks get no results");
        require(ranks[rank].bytes_of_results == bytes, "a result of another size");
    }
    for (RawRank& rank : ranks) {
        rank.socket.close(); // so the hub ends
    }
}

/// How a rank is greeted.
void try_greeting(Draw& draw) {
    Socket const listener = listen_at("127.0.0.1", 0);
    Bytes greeting = greeting_of(
        draw.one_of(
            {Greeting::Verdict::welcome,
             Greeting::Verdict::other_job,
             Greeting::Verdict::other_program}
        ),
        std::string(draw.below(50), 'x')
    );
    damage(draw, greeting);
    std::atomic<bool> is_over{false};
    std::jthread const server{[&] {
        while (!is_over) {
            wait_for(listener, POLLIN, Clock::now() + 2ms);
            Socket const client{
                ::accept4(listener.handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)
            };
            if (client.is_open()) {
                static_cast<void>(client.send(greeting));
                client.end_sending();
                wait_for(client, POLLIN, Clock::now() + 2ms);
            }
        }
    }};
    try {
        TcpJob const job{2, "fuzz", "secret"};
        auto const socket =
            connect_rank(1, job, "127.0.0.1", port_of(listener), Clock::now() + 30ms);
    } catch (joinable::Error const&) {
    } catch (joinable::ContractViolation const&) {
    }
    is_over = true;
}

void run_case(std::uint64_t number) {
    Draw draw{number};
    if (draw.one_in(64)) {
        try_greeting(draw);
    } else if (draw.one_in(2)) {
        try_rank(draw);
    } else {
        try_hub(draw);
    }
}

struct Options {
    double seconds = 2;
    std::uint64_t seed = 1;
    std::uint64_t cases = ~std::uint64_t{0};
};
Options options_of(std::span<char* const> arguments) {
    Options options;
    for (std::size_t i = 1; i < arguments.size(); i += 2) {
        std::string_view const name{arguments[i]};
        char const* const value = i + 1 < arguments.size() ? arguments[i + 1] : nullptr;
        if (value != nullptr && name == "--seconds") {
            options.seconds = std::atof(value);
        } else if (value != nullptr && name == "--seed") {
            options.seed = std::strtoull(value, nullptr, 10);
        } else if (value != nullptr && name == "--cases") {
            options.cases = std::strtoull(value, nullptr, 10);
        } else {
            std::fputs("usage: fuzz_tcp_frames [--seconds 2] [--seed 1] [--cases N]\n", stderr);
            std::exit(2);
        }
    }
    return options;
}

} // namespace

int main(int count, char** arguments) {
    Options const options = options_of({arguments, static_cast<std::size_t>(count)});
    std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
    // In processes of their own, so that what one case does can be told.
    joinable_tests::Shared<std::atomic<std::uint64_t>> current;
    auto const end = Clock::now() + std::chrono::duration<double>(options.seconds);
    std::uint64_t done = 0;
    while (done < options.cases && Clock::now() < end) {
        std::fflush(nullptr);
        pid_t const child = ::fork();
        if (child == 0) {
            std::uint64_t const last = (std::min)(options.cases, done + 200);
            try {
                for (*current = done; *current < last; ++*current) {
                    ::alarm(60); // a case that hangs
                    run_case(options.seed + *current);
                }
            } catch (std::exception const& error) {
                std::fprintf(stderr, "%s\n", error.what());
                std::exit(1);
            }
            std::exit(0); // with what a sanitizer does at the end
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        if (status != 0) {
            std::fprintf(
                stderr,
                "failed: repeat it by --seed %llu --cases 1\n",
                static_cast<unsigned long long>(options.seed + *current)
            );
            return 1;
        }
        done = *current;
    }
    std::printf("%llu cases\n", static_cast<unsigned long long>(done));
}
