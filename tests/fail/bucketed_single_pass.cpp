// SPDX-License-Identifier: BSL-1.0
// EXPECT: views::bucketed: the range must be a forward range also when it is const, and its
// EXPECT: begin and end of one type; copy it into a container first
#include <joinable/join.hpp>

#include <support/misuse.hpp>

/// Can be read once: its iterators are input iterators.
struct Stream {
    struct iterator {
        using iterator_concept = std::input_iterator_tag;
        using value_type = joinable::TensorSize;
        using difference_type = std::ptrdiff_t;
        joinable::TensorSize operator*() const { return {}; }
        iterator& operator++() { return *this; }
        void operator++(int) {}
        bool operator==(iterator const&) const { return true; }
    };
    iterator begin() const { return {}; }
    iterator end() const { return {}; }
};

int main() {
    Stream const stream;
    (void)(stream | joinable::views::bucketed({400}));
}
