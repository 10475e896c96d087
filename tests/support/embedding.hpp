// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/sparse_rows.hpp>

namespace joinable_tests {

/// What an engine has of an embedding, and of a dense parameter of the same extents.
struct Embedding {
    static constexpr std::size_t words = 11;
    static constexpr std::size_t width = 3;

    explicit Embedding(bool are_rows = true) : value(words * width), is_sparse{are_rows} {}

    [[nodiscard]] joinable::Shape extents() const { return {value.size() / width, width}; }

    std::vector<float> value;
    bool is_sparse;
    std::vector<float> dense = {}; ///< the gradient, if it is dense
    std::optional<std::vector<std::int64_t>> indices = {};
    std::vector<std::int32_t> short_indices = {}; ///< in the place of `indices`, if there are any
    std::vector<float> rows = {};
    std::size_t row_width = width;
};

/// What an engine keeps that takes the rows that it was given as its own.
struct ViewedEmbedding {
    std::vector<float> value = std::vector<float>(Embedding::words * Embedding::width);
    joinable::SparseRows gradient = {};
    std::vector<std::int64_t> indices = {};
    std::vector<float> rows = {};
};

/// What an engine keeps whose gradients are rows or dense, as libtorch's are.
struct EitherEmbedding : ViewedEmbedding {
    joinable::AnyView dense = {}; ///< in the place of `gradient`, if there is one
};

/// An embedding of any type of numbers, whose gradients are rows.
template <class Number>
struct NumberEmbedding {
    std::vector<Number> value = std::vector<Number>(Embedding::words * Embedding::width);
    std::optional<std::vector<std::int64_t>> indices = {};
    std::vector<Number> rows = {};
};
template <class Real>
using ComplexEmbedding = NumberEmbedding<std::complex<Real>>;

} // namespace joinable_tests

template <class Number>
struct joinable::parameter_traits<joinable_tests::NumberEmbedding<Number>> {
    using P = joinable_tests::NumberEmbedding<Number>;
    static constexpr std::size_t width = joinable_tests::Embedding::width;
    static std::optional<StridedView<Number>> value(P& p) {
        return StridedView<Number>{
            p.value.data(), {joinable_tests::Embedding::words, width}, {width, 1}
        };
    }
    static std::optional<StridedView<Number>> grad(P&) { return std::nullopt; }
    static bool is_sparse(P const&) { return true; }
    static SparseRows sparse_grad(P& p) {
        if (!p.indices) {
            return {};
        }
        std::size_t const n = p.indices->size();
        return {
            {p.indices->data(), DType::i64, {n}, {1}},
            {p.rows.data(), dtype_of<Number>, {n, width}, {width, 1}}
        };
    }
    static void set_sparse_grad(P& p, SparseRows const& given) {
        auto const indices = given.indices.as<std::int64_t>();
        auto const values = given.values.as<Number>();
        p.indices.emplace(indices.begin(), indices.end());
        p.rows.assign(values.begin(), values.end());
    }
    static void release_grad(P& p) { p.indices.reset(); }
};

template <>
struct joinable::parameter_traits<joinable_tests::Embedding> {
    static std::optional<StridedView<float>> value(joinable_tests::Embedding& p) {
        return StridedView<float>{
            p.value.data(), p.extents(), {joinable_tests::Embedding::width, 1}
        };
    }
    static std::optional<StridedView<float>> grad(joinable_tests::Embedding& p) {
        if (p.dense.empty()) {
            return std::nullopt;
        }
        return StridedView<float>{
            p.dense.data(), p.extents(), {joinable_tests::Embedding::width, 1}
        };
    }
    static std::string_view name(joinable_tests::Embedding const&) { return "embedding"; }
    static bool is_sparse(joinable_tests::Embedding const& p) { return p.is_sparse; }
    static SparseRows sparse_grad(joinable_tests::Embedding& p) {
        if (!p.indices) {
            return {};
        }
        std::size_t const n = p.rows.size() / p.row_width;
        AnyView const values{p.rows.data(), DType::f32, {n, p.row_width}, {p.row_width, 1}};
        return p.short_indices.empty()
                   ? SparseRows{{p.indices->data(), DType::i64, {p.indices->size()}, {1}}, values}
                   : SparseRows{
                         {p.short_indices.data(), DType::i32, {p.short_indices.size()}, {1}}, values
                     };
    }
    static void set_sparse_grad(joinable_tests::Embedding& p, SparseRows const& given) {
        auto const indices = given.indices.as<std::int64_t>();
        auto const values = given.values.as<float>();
        p.indices.emplace(indices.begin(), indices.end());
        p.short_indices.clear();
        p.rows.assign(values.begin(), values.end());
    }
    static void release_grad(joinable_tests::Embedding& p) { p.indices.reset(); }
};

template <>
struct joinable::parameter_traits<joinable_tests::ViewedEmbedding> {
    static std::optional<StridedView<float>> value(joinable_tests::ViewedEmbedding& p) {
        return StridedView<float>{
            p.value.data(),
            {joinable_tests::Embedding::words, joinable_tests::Embedding::width},
            {joinable_tests::Embedding::width, 1}
        };
    }
    static std::optional<StridedView<float>> grad(joinable_tests::ViewedEmbedding&) {
        return std::nullopt;
    }
    static bool is_sparse(joinable_tests::ViewedEmbedding const&) { return true; }
    static SparseRows sparse_grad(joinable_tests::ViewedEmbedding& p) { return p.gradient; }
    static void set_sparse_grad(joinable_tests::ViewedEmbedding& p, SparseRows const& given) {
        p.gradient = given;
    }
    static void release_grad(joinable_tests::ViewedEmbedding& p) { p.gradient = {}; }
};

template <>
struct joinable::parameter_traits<joinable_tests::EitherEmbedding>
    : joinable::parameter_traits<joinable_tests::ViewedEmbedding> {
    static std::optional<StridedView<float>> grad(joinable_tests::EitherEmbedding& p) {
        return p.dense ? std::optional{p.dense.as<float>()} : std::nullopt;
    }
    static void set_grad(joinable_tests::EitherEmbedding& p, AnyView const& view) {
        p.dense = view;
        p.gradient = {};
    }
    static void release_grad(joinable_tests::EitherEmbedding& p) {
        p.dense = {};
        p.gradient = {};
    }
};
