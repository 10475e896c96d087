// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <type_traits>

#include <joinable/hook/keywords.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/join/participants.hpp>

/// @file
/// Explains in one sentence why the arguments of `Join guard{...}` fit no constructor. Without this
/// header the compiler says "class template argument deduction failed" and lists candidates. Each
/// deduction guide below is a worse match than the guides of the constructors, so it is chosen only
/// when those do not match. It names a class whose assertion is the explanation. A parameter `...`
/// takes braces with a misspelt name, which match nothing else. The guides follow the class: clang
/// (14 and 19) otherwise forgets the guides of its constructors.

namespace joinable { inline namespace v0 {

namespace detail {

/// Any participants(...). The conversion makes a guide a worse match than a constructor's.
struct SomeParticipants {
    template <class... Js>
    SomeParticipants(Participants<Js...> const&);
};

template <class T>
inline constexpr bool are_participants = false;
template <class... Js>
inline constexpr bool are_participants<Participants<Js...>> = true;

template <class Given>
struct ParticipantsNotFirst {
    static_assert(
        never<Given>,
        "Join: put participants(...) first, as in Join guard{participants(a, b), {.end_policy = "
        "EndPolicy::drain}, keyword = value}"
    );
};

template <class Given>
struct ArgumentsAfterParticipants {
    static_assert(
        never<Given>,
        "Join: what follows participants(...) must be control(comm) if needed, then options in "
        "braces with the names and the order of JoinOptions, then keyword = value; write "
        "JoinOptions{...} to be told which name is wrong"
    );
};

template <class Keyword>
struct KeywordBeforeOptions {
    static_assert(never<Keyword>, "Join: options in braces must come before keyword = value");
};

struct AlreadyExplained {};

template <class Explanation>
struct Explained {};

} // namespace detail

/// The class that a guard with wrong arguments becomes. It holds only the explanation.
template <class Explanation>
class Join<detail::Explained<Explanation>> : Explanation {
public:
    template <class... Arguments>
    explicit Join(Arguments&&...);
    explicit Join(...);
};

/// The first argument is not participants(...).
template <class Given>
    requires(!detail::are_participants<std::remove_cvref_t<Given>>)
Join(Given&&, ...) -> Join<detail::Explained<detail::ParticipantsNotFirst<Given>>>;
/// The first argument is something in braces.
Join(...) -> Join<detail::Explained<detail::ParticipantsNotFirst<void>>>;

/// participants() has explained the error already.
Join(detail::RefusedParticipants, ...) -> Join<detail::Explained<detail::AlreadyExplained>>;

/// The arguments after participants(...) have none of the accepted forms.
Join(detail::SomeParticipants, ...)
    -> Join<detail::Explained<detail::ArgumentsAfterParticipants<void>>>;
/// The options follow a keyword.
template <class K>
Join(detail::SomeParticipants, detail::KeywordArgument<K>, ...)
    -> Join<detail::Explained<detail::KeywordBeforeOptions<K>>>;

}} // namespace joinable::v0
