// SPDX-License-Identifier: BSL-1.0
// What models what: an archetype of each concept with exactly its members, and one defect per
// negative assertion.
#include <joinable/join.hpp>

#include <array>
#include <chrono>
#include <concepts>
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
static_assert(!AllGathers<Core> && !ReduceScatters<Core> && !Aborts<Core>);
static_assert(!HasDeadline<Core> && !ReportsMissing<Core>);
struct Gathering : Core {
    CompletedWork all_gather(ConstBuffer, Buffer);
};
struct Scattering : Core {
    CompletedWork reduce_scatter(ConstBuffer, Buffer, ReduceOp);
};
struct Aborting : Core {
    void abort(AbortReason);
    bool is_spent() const;
};
struct HalfAborting : Core {
    void abort(AbortReason);
};
struct Timed : Core {
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds);
};
struct TimedWithoutReturn : Core {
    void set_deadline(std::chrono::nanoseconds);
};
struct Reporting : Core {
    std::vector<int> missing() const;
};
static_assert(AllGathers<Gathering> && ReduceScatters<Scattering> && Aborts<Aborting>);
static_assert(!Aborts<HalfAborting>);
static_assert(HasDeadline<Timed> && !HasDeadline<TimedWithoutReturn> && ReportsMissing<Reporting>);
static_assert(AllGathers<SelfCommunicator> && AllGathers<ThreadCommunicator>);
static_assert(!AllGathers<joinable_tests::CoreOnly<ThreadCommunicator>>);

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
