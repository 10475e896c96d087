// SPDX-License-Identifier: BSL-1.0
// The engine's loops, compiled once, and well whatever the rest is compiled for. Inner loops run along contiguous
// rows, so that they vectorise.
#include "engine.hpp"

#include <cstddef>

void train_text::multiply_add(Matrix const& a, Matrix const& b, Matrix& out) {
    for (std::size_t i = 0; i < a.rows; ++i) {
        for (std::size_t k = 0; k < a.columns; ++k) {
            float const factor = a.row(i)[k];
            float const* const from = b.row(k);
            float* const to = out.row(i);
            for (std::size_t j = 0; j < b.columns; ++j) {
                to[j] += factor * from[j];
            }
        }
    }
}

void train_text::multiply_transposed(Matrix const& a, Matrix const& b, Matrix& out) {
    out.numbers.assign(out.numbers.size(), 0.0F);
    for (std::size_t i = 0; i < a.rows; ++i) {
        for (std::size_t k = 0; k < a.columns; ++k) {
            float const factor = a.row(i)[k];
            float const* const from = b.row(i);
            float* const to = out.row(k);
            for (std::size_t j = 0; j < b.columns; ++j) {
                to[j] += factor * from[j];
            }
        }
    }
}

train_text::Matrix train_text::transposed(Matrix const& a) {
    Matrix out{a.columns, a.rows};
    for (std::size_t i = 0; i < a.rows; ++i) {
        for (std::size_t j = 0; j < a.columns; ++j) {
            out.row(j)[i] = a.row(i)[j];
        }
    }
    return out;
}

void train_text::sum_rows(Matrix const& a, Matrix& out) {
    out.numbers.assign(out.numbers.size(), 0.0F);
    for (std::size_t i = 0; i < a.rows; ++i) {
        for (std::size_t j = 0; j < a.columns; ++j) {
            out.numbers[j] += a.row(i)[j];
        }
    }
}
