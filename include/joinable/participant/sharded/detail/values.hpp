// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <joinable/bucket/memory.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Stands for an engine's parameter of whose value this rank keeps a part. The step sees the part,
/// and everything else is the engine's.
struct PartOfParameter {
    AnyParameter whole;
    /// Has the extents of the whole value and memory for the elements that this rank owns. Empty if
    /// the parameter is not sharded.
    AnyView value = {};
};

}}} // namespace joinable::v0::detail

template <>
struct joinable::parameter_traits<joinable::detail::PartOfParameter> {
    using Part = joinable::detail::PartOfParameter;
    static std::optional<AnyView> value(Part& p) { return p.value ? p.value : p.whole.value(); }
    static std::optional<AnyView> grad(Part& p) {
        AnyView const gradient = p.whole.grad();
        return gradient ? std::optional{gradient} : std::nullopt;
    }
    static bool requires_grad(Part const& p) { return p.whole.requires_grad(); }
    static std::string_view name(Part const& p) { return p.whole.name(); }
    static void release_grad(Part& p) { p.whole.release_grad(); }
    static void set_value(Part& p, AnyView const& view) { p.whole.set_value(view); }
    static void release_value(Part& p) { p.whole.release_value(); }
};

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  the value of parameter `i` cannot be set. `what` it then cannot do, and
///         what to do `otherwise`, complete the sentence.
void require_settable(
    ParameterList const& parameters,
    std::size_t i,
    std::string_view what,
    std::string_view otherwise
);

/// The values of a group of parameters; this rank keeps those that it owns. Local.
class ShardedValues {
public:
    /// Allocates memory. Takes the current extents and order of the values.
    /// @throws ContractViolation  a value cannot be set.
    ShardedValues(
        ParameterList const& parameters,
        std::span<OptimizerShard const> shards,
        BufferMemory const& memory
    );

    /// Copies what this rank owns from the engine's values; on a device, complete after its
    /// finish().
    /// @throws ContractViolation  a value is missing; then nothing was copied.
    void take(std::span<OptimizerShard const> shards, Scratch& scratch);
    /// Frees the engine's values.
    void release() const {
        for (PartOfParameter const& parameter : parameters_) {
            if (parameter.value) {
                parameter.whole.release_value();
            }
        }
    }

    [[nodiscard]] ParameterList const& given() const noexcept { return whole_; }
    /// This rank's part of a shard's values.
    [[nodiscard]] std::byte const* part(std::size_t shard) const noexcept { return at(shard); }
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

    /// The parameters. Stand-ins, which live as long as `self`, replace the sharded ones.
    [[nodiscard]] static ParameterList list(std::shared_ptr<ShardedValues> const& self);

private:
    [[nodiscard]] std::byte* at(std::size_t shard) const noexcept {
        return memory_.data() + begins_[shard];
    }

    ParameterList whole_; ///< the engine's
    std::vector<PartOfParameter> parameters_;
    Arena memory_;                    ///< of the parts
    std::vector<std::size_t> begins_; ///< of each shard's, in bytes: at cache lines
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/sharded/detail/impl/values.ipp>
#endif
