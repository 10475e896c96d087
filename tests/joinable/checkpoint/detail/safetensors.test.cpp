// SPDX-License-Identifier: BSL-1.0
// The layout of files. Oracles: the format's description, and files of Python's safetensors in
// ../checkpoint.test.cpp.
#include <joinable/checkpoint/detail/safetensors.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <support/failure_text.hpp>

namespace {

using joinable_tests::says;

using joinable::ContractViolation;
using joinable::DType;
using joinable::Shape;
using joinable::detail::FileHeader;
using joinable::detail::header_length;
using joinable::detail::header_text;
using joinable::detail::HeaderParser;
using joinable::detail::place_tensors;
using joinable::detail::StoredTensor;

constexpr std::string_view file = "model.safetensors";

FileHeader parse(std::string_view text, std::uint64_t data_bytes) {
    return HeaderParser{file, data_bytes}.parse(text);
}

/// The text of what parsing throws.
std::string refusal(std::string_view text, std::uint64_t data_bytes) {
    try {
        static_cast<void>(parse(text, data_bytes));
    } catch (ContractViolation const& error) {
        return error.what();
    }
    return "nothing";
}
TEST_CASE("a header is what the format's description prints, and is read back") {
    FileHeader header;
    header.tensors = {
        {"half", DType::bf16, Shape{3}},
        {"w", DType::f32, Shape{2, 3}},
        {"none", DType::f64, Shape{0}}
    };
    header.metadata = {{"format", "joinable"}};
    place_tensors(header.tensors);
    std::string const text = header_text(file, header);
    CHECK(text.size() % 8 == 0);
    CHECK(
        text.substr(8, text.find_last_of('}') - 7) ==
        R"({"__metadata__":{"format":"joinable"},)"
        R"("half":{"data_offsets":[24,30],"dtype":"BF16","shape":[3]},)"
        R"("none":{"data_offsets":[0,0],"dtype":"F64","shape":[0]},)"
        R"("w":{"data_offsets":[0,24],"dtype":"F32","shape":[2,3]}})"
    );
    REQUIRE(header_length(file, text, text.size() + 30) == text.size() - 8);

    FileHeader const read = parse(std::string_view{text}.substr(8), 30);
    CHECK(read.metadata == header.metadata);
    REQUIRE(read.tensors.size() == 3);
    CHECK(read.tensors[0].name == "none");
    CHECK(read.tensors[1].name == "w");
    CHECK(read.tensors[1].extents == Shape{2, 3});
    CHECK(read.tensors[2].dtype == DType::bf16);
    CHECK(read.tensors[2].begin == 24);
}

TEST_CASE("every dtype has a name in the format") {
    for (std::size_t k = 0; k < joinable::dtype_count; ++k) {
        if (joinable::detail::is_complex(static_cast<DType>(k))) {
            continue; // it is a pair of reals
        }
        FileHeader header{{{"t", static_cast<DType>(k), Shape{}}}, {}};
        place_tensors(header.tensors);
        std::string const text = header_text(file, header);
        FileHeader const read = parse(std::string_view{text}.substr(8), size_of(DType(k)));
        REQUIRE(read.tensors.size() == 1);
        CHECK(read.tensors[0].dtype == static_cast<DType>(k));
        CHECK(read.tensors[0].extents.empty());
    }
}

TEST_CASE("numbers of 8 bits are refused, and the names are those of the format") {
    auto const header = [](std::string const& dtype) {
        return R"({"t":{"dtype":")" + dtype + R"(","shape":[2],"data_offsets":[0,)" +
               (dtype == "BOOL" ? "2" : "4") + "]}}";
    };
    CHECK(parse(header("BOOL"), 2).tensors[0].dtype == DType::boolean);
    CHECK(parse(header("I16"), 4).tensors[0].dtype == DType::i16);
    CHECK(parse(header("U16"), 4).tensors[0].dtype == DType::u16);
    for (std::string const dtype : {"F8_E4M3", "F8_E5M2"}) {
        std::string const text = "tensor t is of dtype \"" + dtype +
                                 "\", but numbers of 8 bits have no DType; store F16 or wider ones";
        CHECK_THROWS_WITH_AS(
            static_cast<void>(parse(header(dtype), 4)),
            ("checkpoint " + std::string{file} + ": " + text).c_str(),
            ContractViolation
        );
    }
}

TEST_CASE("a length that the file cannot have is refused before the header is read") {
    std::string const ten{"\x0a\0\0\0\0\0\0\0", 8};
    CHECK(header_length(file, ten, 18) == 10);
    CHECK_THROWS_AS(static_cast<void>(header_length(file, ten, 17)), ContractViolation);
    CHECK_THROWS_AS(static_cast<void>(header_length(file, "1234567", 7)), ContractViolation);
    std::string const large(8, '\xff');
    CHECK_THROWS_AS(static_cast<void>(header_length(file, large, 1U << 30U)), ContractViolation);
    std::string const sparse{"\x01\xe1\xf5\x05\0\0\0\0", 8}; // one more than 100'000'000
    CHECK_THROWS_AS(static_cast<void>(header_length(file, sparse, 1ULL << 40U)), ContractViolation);
}

TEST_CASE("what the format does not allow is refused by a text that names file and tensor") {
    struct Case {
        std::string_view text;
        std::uint64_t data_bytes;
        std::string_view expected;
    };
    Case const cases[] = {
        {"", 0, "no JSON"},
        {"{", 0, "no JSON"},
        {"{\"\xff\":1}", 0, "no JSON"},
        {"[]", 0, "its header is array"},
        {"[[[[[]]]]]", 0, "nests deeper"},
        {R"({"w":{"dtype":{"a":{"b":1}}}})", 0, "nests deeper"},
        {R"({"w":1})", 0, "tensor w has no dtype"},
        {R"({"w":{"dtype":"F32","shape":[1]}})", 4, "tensor w has no data_offsets"},
        {R"({"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", 1, "dtype \"F8_E4M3\""},
        {R"({"w":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype 7"},
        {R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "shape [-1]"},
        {R"({"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4, "shape [1.5]"},
        {R"({"w":{"dtype":"F32","shape":{"a":1},"data_offsets":[0,4]}})", 4, "whole numbers"},
        {R"({"w":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4, "shape 1"},
        {R"({"w":{"dtype":"F32","shape":{},"data_offsets":[0,4]}})", 4, "expected is a list"},
        {R"({"w":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})",
         1,
         "9 dimensions"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "data_offsets [0]"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "data_offsets [4,0]"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "the 4 bytes of data"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "w is f32 (2), but"},
        {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})",
         0,
         "0 bytes"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "there is a gap"},
        {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
         R"("w":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
         4,
         "tensor w begins at byte 2 of the data, but the one before ends at 3: they overlap"},
        {R"({"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 4, "3 bytes, but its data 4"},
        {R"({"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
         R"("w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
         0,
         "has \"w\" twice"},
        {R"({"w":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}})",
         0,
         "\"shape\" twice"},
        {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "\"a\" twice"},
        {R"({"__metadata__":{"steps":1}})", 0, "number as steps"},
        {R"({"__metadata__":["a"]})", 0, "its __metadata__ is array"},
    };
    for (Case const& c : cases) {
        CAPTURE(c.text);
        std::string const text = refusal(c.text, c.data_bytes);
        CAPTURE(text);
        says(text, c.expected);
        says(text, file);
    }
    CHECK(
        refusal(
            R"({"w":{"dtype":"F32","shape":[0,4294967296,4294967296,4],"data_offsets":[0,0]}})", 0
        ) == "nothing"
    );
    CHECK(refusal("{}   ", 0) == "nothing");
}

TEST_CASE("a name that is no UTF-8 is refused when it is to be written") {
    FileHeader const header{{{"\xff", DType::f32, Shape{}, 0, 4}}, {}};
    CHECK_THROWS_AS(static_cast<void>(header_text(file, header)), ContractViolation);
}

} // namespace
