// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/environment.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class C>
concept is_launchable = Communicator<C> && names_transport<C> && requires {
    { C::is_launched() } -> std::same_as<bool>;
    { C::from_environment() } -> std::same_as<C>;
};

template <class Comm, class Memory>
consteval bool check_launchable() {
    static_assert(
        is_launchable<Comm>,
        "connect: a transport needs 'static constexpr std::string_view transport', 'static bool is_launched()' "
        "and 'static from_environment()'; threads have none, because run_threads() starts them"
    );
    static_assert(
        std::same_as<typename device_type_of<Comm>::type, Memory>,
        "connect: the transports move memory of different devices; name those of one"
    );
    return true;
}

} // namespace detail

/// Connects the ranks of a job by the transport of this name, or by the first one that was launched: what PyTorch's
/// init_process_group(backend) does. Collective; blocks. All ranks must choose the same.
///
/// @code
/// auto comm = joinable::connect<joinable::MpiCommunicator, joinable::ProcessCommunicator>(name);
/// @endcode
///
/// `C` is each of `Comms`.
/// | expression              | result      | meaning                                                      |
/// |-------------------------|-------------|--------------------------------------------------------------|
/// | `C::transport`          | string_view | static constexpr; its name, such as "mpi"                    |
/// | `C::is_launched()`      | bool        | static; local, without an exchange: this process seems to be |
/// |                         |             | one of its ranks; throws what the variables make it throw    |
/// | `C::from_environment()` | C           | static; collective: connects them                            |
/// @throws ContractViolation  no transport has that name; or none was launched.
/// @throws what from_environment() of the chosen one throws.
template <class First, class... Comms>
[[nodiscard]] auto connect(std::string_view transport = {}) {
    using Memory = typename detail::device_type_of<First>::type;
    static_assert(
        (detail::check_launchable<First, Memory>() && ... &&
         detail::check_launchable<Comms, Memory>())
    );
    std::optional<BasicAnyCommunicator<Memory>> comm;
    std::string names;
    auto const connects = [&]<class Comm>(std::type_identity<Comm>) {
        names += detail::concat(names.empty() ? "" : ", ", Comm::transport);
        if (transport.empty() ? Comm::is_launched() : transport == Comm::transport) {
            comm.emplace(std::unique_ptr<Comm>{new Comm(Comm::from_environment())});
        }
        return comm.has_value();
    };
    if (!(connects(std::type_identity<First>{}) || ... || connects(std::type_identity<Comms>{}))) {
        throw ContractViolation{
            transport.empty()
                ? detail::concat(
                      "expected that a launcher of one of these transports started this process: ",
                      names,
                      "; start the ranks by mpirun, torchrun or srun, which set one of ",
                      detail::own_environment().names_of_ranks(),
                      "; a transport between machines needs JOINABLE_ADDR or MASTER_ADDR, too, and "
                      "processes must be on one machine"
                  )
                : detail::concat(
                      "expected the name of one of these transports: ",
                      names,
                      "; given \"",
                      transport,
                      "\""
                  )
        };
    }
    return std::move(*comm);
}

}} // namespace joinable::v0
