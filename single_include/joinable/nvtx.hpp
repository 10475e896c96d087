// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <nvtx3/nvToolsExt.h>
#include <string_view>
#include <utility>

#include "join.hpp"

// ---- joinable/interop/nvtx_timeline.hpp

namespace joinable { inline namespace v0 {

/// Shows rounds to NVIDIA's profilers, in a domain named "joinable". The ranges are "round", "shadow round",
/// "roll call", "forward", "backward" and "bucket <index>"; the payload of a bucket is its size in bytes.
/// Ranges are started and ended (nvtxDomainRangeStartEx), not pushed and popped, so they may overlap each
/// other and those of the engine. Without a profiler a range costs two calls of a null function.
///
/// Ranges have the times of the host. The range of a bucket on a device ends when the engine's stream has
/// been told to wait for the bucket. A profiler shows when its kernels run, and which range launched them.
///
/// @code
/// joinable::DistributedDataParallel<
///     joinable::NcclCommunicator, joinable::AllReduce, joinable::NvtxTimeline> ddp{
///     comm, model.parameters()};
/// @endcode
class NvtxTimeline {
public:
    /// Its destruction ends the range.
    class [[nodiscard]] Range {
    public:
        Range(Range&& other) noexcept
            : id_{other.id_}, is_open_{std::exchange(other.is_open_, false)} {}
        Range& operator=(Range&&) = delete;
        ~Range() {
            if (is_open_) {
                nvtxDomainRangeEnd(domain(), id_);
            }
        }

    private:
        friend class NvtxTimeline;
        Range(char const* name, std::uint64_t payload) noexcept {
            nvtxEventAttributes_t event{};
            event.version = NVTX_VERSION;
            event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
            event.messageType = NVTX_MESSAGE_TYPE_ASCII;
            event.message.ascii = name; // copied
            event.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
            event.payload.ullValue = payload;
            id_ = nvtxDomainRangeStartEx(domain(), &event);
        }

        nvtxRangeId_t id_ = 0;
        bool is_open_ = true;
    };

    /// The payload is the number of rounds of this kind before it.
    [[nodiscard]] Range round(bool is_shadow) noexcept {
        return is_shadow ? Range{"shadow round", shadow_rounds_++} : Range{"round", rounds_++};
    }
    [[nodiscard]] static Range forward() noexcept { return {"forward", 0}; }
    [[nodiscard]] static Range backward() noexcept { return {"backward", 0}; }
    [[nodiscard]] static Range roll_call() noexcept { return {"roll call", 0}; }
    [[nodiscard]] static Range bucket(std::size_t index, std::size_t bytes) noexcept {
        constexpr std::string_view kind = "bucket ";
        std::array<char, 32> name{};
        kind.copy(name.data(), kind.size());
        std::to_chars(name.data() + kind.size(), name.data() + name.size() - 1, index);
        return {name.data(), bytes};
    }

private:
    /// Never destroyed: ranges may end after main().
    static nvtxDomainHandle_t domain() noexcept {
        static nvtxDomainHandle_t const made = nvtxDomainCreateA("joinable");
        return made;
    }

    std::uint64_t rounds_ = 0;
    std::uint64_t shadow_rounds_ = 0;
};
static_assert(Timeline<NvtxTimeline>);

}} // namespace joinable::v0

// ---- joinable/nvtx.hpp

/// @file
/// Opt-in: ranges for NVIDIA's profilers. Needs NVTX 3, a header-only library of the CUDA Toolkit;
/// in CMake, the target CUDA::nvtx3.
