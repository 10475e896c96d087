// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// The result of a call that names something: a text that outlives the call. One that is returned by
/// value, such as a std::string, would die before its view is read.
template <class Text>
concept lasting_text = std::convertible_to<Text, std::string_view> &&
                       (std::is_lvalue_reference_v<Text> || std::is_pointer_v<Text> ||
                        std::ranges::enable_borrowed_range<Text>);

inline std::string to_text(std::string_view piece) {
    return std::string{piece};
}

template <std::integral Number>
std::string to_text(Number number) {
    return std::to_string(number);
}

/// With a point, whatever the locale: so many significant digits, or digits after the point if it is
/// fixed.
inline std::string number_text(double number, std::chars_format format, int digits) {
    std::array<char, 400> text{}; // the largest number has 309 digits
    auto const end =
        std::to_chars(text.data(), text.data() + text.size(), number, format, digits).ptr;
    return {text.data(), end};
}

/// Six significant digits in the shortest form: "0.5", "300", "1e-07".
inline std::string to_text(double number) {
    return number_text(number, std::chars_format::general, 6);
}

/// "3", "3 and 5", "1, 3 and 5": the form of ranks and indices in error texts.
template <class Number>
std::string to_text(std::vector<Number> const& numbers) {
    std::string text;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (i != 0) {
            text += i + 1 == numbers.size() ? " and " : ", ";
        }
        text += to_text(numbers[i]);
    }
    return text;
}

/// At least three significant digits, for people: "12.3", "4711".
inline std::string rounded_text(double number) {
    return number < 99.95 ? number_text(number, std::chars_format::general, 3)
                          : number_text(number, std::chars_format::fixed, 0);
}

/// A piece of a text and the function that appends it. concat() is instantiated for very many lists
/// of types, so the code of each instance must be small.
struct TextPiece {
    void const* piece;
    void (*append)(std::string& text, void const* piece);
};

template <class Piece>
TextPiece text_piece(Piece const& piece) noexcept {
    return {&piece, [](std::string& text, void const* from) {
                text += to_text(*static_cast<Piece const*>(from));
            }};
}
inline TextPiece text_piece(char const* piece) noexcept { // also for literals of any length
    return {piece, [](std::string& text, void const* from) {
                text += static_cast<char const*>(from);
            }};
}

inline std::string concat_pieces(std::initializer_list<TextPiece> pieces) {
    std::string text;
    for (TextPiece const& piece : pieces) {
        piece.append(text, piece.piece);
    }
    return text;
}

/// Joins strings, numbers and lists of numbers into one error text.
template <class... Pieces>
std::string concat(Pieces const&... pieces) {
    return concat_pieces({text_piece(pieces)...});
}

/// "rank 3" or "ranks 1, 3 and 5".
inline std::string ranks_text(std::vector<int> const& ranks) {
    return concat(ranks.size() == 1 ? "rank " : "ranks ", ranks);
}

/// The end of a text that was cut.
inline constexpr std::string_view cut_mark = "...";
/// How many bytes to keep of a text longer than `most` bytes, before that mark. It keeps whole
/// UTF-8 characters.
[[nodiscard]] inline std::size_t
length_before_cut(std::string_view text, std::size_t most) noexcept {
    std::size_t length = most - cut_mark.size();
    while (length != 0 && (static_cast<unsigned char>(text[length]) & 0xc0U) == 0x80U) {
        --length;
    }
    return length;
}
/// The same text, cut if it is longer.
[[nodiscard]] inline std::string cut_text(std::string text, std::size_t most) {
    if (text.size() > most) {
        text.resize(length_before_cut(text, most));
        text += cut_mark;
    }
    return text;
}

}}} // namespace joinable::v0::detail
