// SPDX-License-Identifier: BSL-1.0
// What models what: an archetype of each concept with exactly its members, and one defect per
// negative assertion.
#include <joinable/join.hpp>

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <support/all_reducer.hpp>
#include <support/recording_communicator.hpp>

namespace {

using namespace joinable;

enum class Missing {
    nothing,
    rank,
    size,
    all_reduce,
    broadcast,
    barrier,
    main_hook,
    post_hook,
    join_hook,
    join_communicator,
    join_state,
    data,
    extents,
    dtype,
    value,
    grad,
    wait,
    test,
};

template <Missing M>
struct MinimalWork {
    void wait()
        requires(M != Missing::wait);
    bool test()
        requires(M != Missing::test);
};
static_assert(Work<MinimalWork<Missing::nothing>>);
static_assert(!Work<MinimalWork<Missing::wait>>);
static_assert(!Work<MinimalWork<Missing::test>>);

template <Missing M, class W = MinimalWork<Missing::nothing>>
struct MinimalCommunicator {
    int rank() const
        requires(M != Missing::rank);
    int size() const
        requires(M != Missing::size);
    W all_reduce(Buffer, ReduceOp)
        requires(M != Missing::all_reduce);
    W broadcast(Buffer, int)
        requires(M != Missing::broadcast);
    void barrier()
        requires(M != Missing::barrier);
};
static_assert(Communicator<MinimalCommunicator<Missing::nothing>>);
static_assert(!Communicator<MinimalCommunicator<Missing::rank>>);
static_assert(!Communicator<MinimalCommunicator<Missing::size>>);
static_assert(!Communicator<MinimalCommunicator<Missing::all_reduce>>);
static_assert(!Communicator<MinimalCommunicator<Missing::broadcast>>);
static_assert(!Communicator<MinimalCommunicator<Missing::barrier>>);
static_assert(!Communicator<MinimalCommunicator<Missing::nothing, int>>); // no Work is returned

// A communicator with the core's members has no other capability, and each is its own concept.
using Core = MinimalCommunicator<Missing::nothing>;
static_assert(!AllGathers<Core> && !ReduceScatters<Core> && !Reduces<Core> && !Gathers<Core>);
static_assert(!Scatters<Core> && !AllToAlls<Core> && !SendsAndReceives<Core> && !Splits<Core>);
static_assert(!Aborts<Core> && !HasDeadline<Core> && !RenewsDeadline<Core>);
static_assert(!ReportsMissing<Core>);
using Counts = std::span<std::size_t const>;
enum class Lacks { nothing, plain, counts, work };
/// Each operation has two forms, and both return a Work: exactly these, and one defect each.
template <Lacks L>
struct Collecting : Core {
    using W = std::conditional_t<L == Lacks::work, void, CompletedWork>;
    W all_gather(ConstBuffer, Buffer)
        requires(L != Lacks::plain);
    W all_gather(ConstBuffer, Buffer, Counts)
        requires(L != Lacks::counts);
    W reduce_scatter(ConstBuffer, Buffer, ReduceOp)
        requires(L != Lacks::plain);
    W reduce_scatter(ConstBuffer, Buffer, ReduceOp, Counts)
        requires(L != Lacks::counts);
    W gather(ConstBuffer, Buffer, int)
        requires(L != Lacks::plain);
    W gather(ConstBuffer, Buffer, int, Counts)
        requires(L != Lacks::counts);
    W scatter(ConstBuffer, Buffer, int)
        requires(L != Lacks::plain);
    W scatter(ConstBuffer, Buffer, int, Counts)
        requires(L != Lacks::counts);
    W all_to_all(ConstBuffer, Buffer)
        requires(L != Lacks::plain);
    W all_to_all(ConstBuffer, Buffer, Counts, Counts)
        requires(L != Lacks::counts);
    W send(ConstBuffer, int, int)
        requires(L != Lacks::plain);
    W receive(Buffer, int, int)
        requires(L != Lacks::counts);
    W reduce(Buffer, ReduceOp, int);
};
template <Lacks L>
constexpr bool collects_any =
    AllGathers<Collecting<L>> || ReduceScatters<Collecting<L>> || Gathers<Collecting<L>> ||
    Scatters<Collecting<L>> || AllToAlls<Collecting<L>> || SendsAndReceives<Collecting<L>>;
using All = Collecting<Lacks::nothing>;
static_assert(AllGathers<All> && ReduceScatters<All> && Gathers<All> && Scatters<All>);
static_assert(AllToAlls<All> && SendsAndReceives<All> && Reduces<All>);
static_assert(!collects_any<Lacks::plain> && !collects_any<Lacks::counts>);
static_assert(!collects_any<Lacks::work> && !Reduces<Collecting<Lacks::work>>);
struct Splitting : Core {
    Core split(int color, int key);
};
struct SplittingIntoSomethingElse : Core {
    int split(int color, int key);
};
static_assert(Splits<Splitting> && !Splits<SplittingIntoSomethingElse>);
struct Aborting : Core {
    void abort(AbortReason);
    bool is_aborted() const;
};
struct HalfAborting : Core {
    void abort(AbortReason);
};
struct Telling : Aborting {
    std::optional<AbortReason> abort_reason() const;
};
struct TellingWithoutAbort : Core {
    std::optional<AbortReason> abort_reason() const;
};
struct TellingText : Aborting {
    std::string abort_reason() const;
};
struct Timed : Core {
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds);
};
struct TimedWithoutReturn : Core {
    void set_deadline(std::chrono::nanoseconds);
};
struct Reporting : Core {
    std::vector<int> missing_ranks() const;
};
struct Renewing : Timed {
    void keep_alive();
};
struct AliveWithoutDeadline : Core {
    void keep_alive();
};
static_assert(RenewsDeadline<Renewing> && !RenewsDeadline<AliveWithoutDeadline>);
static_assert(Aborts<Aborting>);
static_assert(!Aborts<HalfAborting>);
static_assert(TellsReason<Telling> && !TellsReason<Aborting>);
static_assert(!TellsReason<TellingWithoutAbort> && !TellsReason<TellingText>);
static_assert(HasDeadline<Timed> && !HasDeadline<TimedWithoutReturn> && ReportsMissing<Reporting>);
template <class C>
constexpr bool collects_everything =
    AllGathers<C> && ReduceScatters<C> && Reduces<C> && Gathers<C> && Scatters<C> && AllToAlls<C>;
static_assert(collects_everything<SelfCommunicator> && collects_everything<ThreadCommunicator>);
static_assert(SendsAndReceives<ThreadCommunicator> && Splits<ThreadCommunicator>);
static_assert(RenewsDeadline<ThreadCommunicator> && ReportsMissing<ThreadCommunicator>);
static_assert(TellsReason<SelfCommunicator> && TellsReason<ThreadCommunicator>);
static_assert(RenewsDeadline<SelfCommunicator> && RenewsDeadline<ThreadCommunicator>);
static_assert(ReportsMissing<SelfCommunicator> && ReportsMissing<ThreadCommunicator>);
static_assert(!AllGathers<joinable_tests::CoreOnly<ThreadCommunicator>>);
static_assert(ScalesSums<ThreadCommunicator> && ScalesSums<SelfCommunicator>);
struct Scaling : Core {
    using Core::all_reduce;
    CompletedWork all_reduce(Buffer, ReduceOp, double factor);
};
struct ScalingWithoutWork : Core {
    using Core::all_reduce;
    void all_reduce(Buffer, ReduceOp, double factor);
};
static_assert(ScalesSums<Scaling> && !ScalesSums<ScalingWithoutWork> && !ScalesSums<Core>);
struct ScalingParts : All {
    using All::all_reduce;
    using All::reduce_scatter;
    CompletedWork all_reduce(Buffer, ReduceOp, double factor);
    CompletedWork reduce_scatter(ConstBuffer, Buffer, ReduceOp, double factor);
    CompletedWork reduce_scatter(ConstBuffer, Buffer, ReduceOp, double factor, Counts);
};
struct ScalingEqualParts : All {
    using All::all_reduce;
    using All::reduce_scatter;
    CompletedWork all_reduce(Buffer, ReduceOp, double factor);
    CompletedWork reduce_scatter(ConstBuffer, Buffer, ReduceOp, double factor);
};
static_assert(ScalesScatteredSums<ScalingParts> && !ScalesScatteredSums<ScalingEqualParts>);
static_assert(ScalesScatteredSums<ThreadCommunicator> && ScalesScatteredSums<SelfCommunicator>);
static_assert(!ScalesScatteredSums<Scaling> && !ScalesScatteredSums<All>);
struct Allocating : Core {
    Arena allocate(std::size_t bytes, std::size_t alignment);
};
struct AllocatingSomethingElse : Core {
    void* allocate(std::size_t bytes, std::size_t alignment);
};
static_assert(AllocatesArena<Allocating> && !AllocatesArena<AllocatingSomethingElse>);
static_assert(!AllocatesArena<Core> && !SharesMemory<Core>);
struct TimingRounds {
    static int round(bool is_shadow);
};
struct TimingBuckets {
    static int bucket(std::size_t index, std::size_t bytes);
};
struct TimingAll : TimingRounds, TimingBuckets {};
struct TimingIntoNothing : TimingBuckets {
    static void round(bool is_shadow);
};
static_assert(Timeline<NoTimeline> && Timeline<TimingAll> && !Timeline<TimingIntoNothing>);
static_assert(!Timeline<TimingRounds> && !Timeline<TimingBuckets>);
struct Registering : Allocating {
    bool register_arena(Arena const& arena);
};
struct RegisteringWithoutArenas : Core {
    bool register_arena(Arena const& arena);
};
struct RegisteringWithoutAnswer : Allocating {
    void register_arena(Arena const& arena);
};
static_assert(RegistersArenas<Registering> && !RegistersArenas<Allocating>);
static_assert(!RegistersArenas<RegisteringWithoutArenas> && !RegistersArenas<RegisteringWithoutAnswer>);
struct Sharing : Core {
    Arena share(std::size_t bytes);
};
struct SharingSomethingElse : Core {
    std::span<std::byte> share(std::size_t bytes);
};
static_assert(SharesMemory<Sharing> && !SharesMemory<SharingSomethingElse>);
static_assert(SharesMemory<SelfCommunicator> && SharesMemory<ThreadCommunicator>);
static_assert(Tensor<SharedBuffer<float>> && WritableTensor<SharedBuffer<float> const>);
struct Pair {
    int a;
    float b;
};
static_assert(!Tensor<SharedBuffer<Pair>>); // it can be shared, and has no dtype

template <Missing M>
struct MinimalHook {
    MinimalHook() = default;
    MinimalHook(MinimalHook&&) = delete; // need not be movable
    void main_hook()
        requires(M != Missing::main_hook);
    void post_hook(bool)
        requires(M != Missing::post_hook);
};
static_assert(JoinHook<MinimalHook<Missing::nothing>>);
static_assert(!JoinHook<MinimalHook<Missing::main_hook>>);
static_assert(!JoinHook<MinimalHook<Missing::post_hook>>);
struct InformedHook {
    void main_hook(Round const&);
    void post_hook(JoinResult const&);
};
static_assert(JoinHook<InformedHook>);

template <Missing M, class H = MinimalHook<Missing::nothing>>
struct MinimalJoinable {
    H join_hook(arguments<keywords<>> const&)
        requires(M != Missing::join_hook);
    Core& join_communicator()
        requires(M != Missing::join_communicator);
    JoinState& join_state()
        requires(M != Missing::join_state);
};
static_assert(Joinable<MinimalJoinable<Missing::nothing>>);
static_assert(!Joinable<MinimalJoinable<Missing::join_hook>>);
static_assert(!Joinable<MinimalJoinable<Missing::join_communicator>>);
static_assert(!Joinable<MinimalJoinable<Missing::join_state>>);
static_assert(!Joinable<MinimalJoinable<Missing::nothing, MinimalHook<Missing::main_hook>>>);
static_assert(Joinable<DistributedDataParallel<ThreadCommunicator>>);
static_assert(Joinable<joinable_tests::AllReducer<ThreadCommunicator>>);

template <Missing M>
struct MinimalTensor {};
template <Missing M>
struct MinimalParameter {};

} // namespace

template <Missing M>
struct joinable::tensor_traits<MinimalTensor<M>> {
    using T = MinimalTensor<M>;
    static DType dtype(T const&)
        requires(M != Missing::dtype);
    static void* data(T&)
        requires(M != Missing::data);
    static std::array<int, 1> extents(T const&)
        requires(M != Missing::extents);
};
template <Missing M>
struct joinable::parameter_traits<MinimalParameter<M>> {
    using P = MinimalParameter<M>;
    static std::vector<float>* value(P&)
        requires(M != Missing::value);
    static std::vector<float>* grad(P&)
        requires(M != Missing::grad);
};

namespace {

static_assert(WritableTensor<MinimalTensor<Missing::nothing>>);
static_assert(!Tensor<MinimalTensor<Missing::nothing> const>); // it can only be written
static_assert(!Tensor<MinimalTensor<Missing::dtype>>);
static_assert(!Tensor<MinimalTensor<Missing::data>>);
static_assert(!Tensor<MinimalTensor<Missing::extents>>);
static_assert(Parameter<MinimalParameter<Missing::nothing>>);
static_assert(!Parameter<MinimalParameter<Missing::value>>);
static_assert(!Parameter<MinimalParameter<Missing::grad>>);

// A type of a guard does not depend on the keywords of a call, and nothing of it moves.
using Guard = Join<MinimalJoinable<Missing::nothing>>;
static_assert(!std::movable<Guard> && !std::copyable<Guard>);
static_assert(!std::copyable<JoinState> && !std::movable<JoinState>);

} // namespace
