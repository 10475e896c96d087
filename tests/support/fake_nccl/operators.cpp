// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <cstring>
#include <mutex>
#include <type_traits>

#include <nccl.h>
#include <support/fake_nccl/arithmetic.hpp>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/windows.hpp>
#include <support/fake_nccl/world.hpp>
#include <support/for_each_type.hpp>

#include <joinable/tensor/dtype.hpp>

using namespace joinable_tests::fake_nccl;

extern "C" {

ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* op,
    void* scalar,
    ncclDataType_t type,
    ncclScalarResidence_t residence,
    ncclComm_t comm
) {
    return call(comm, "ncclRedOpCreatePreMulSum", [&](auto&, Member& member) {
        bool const is_later = residence == ncclScalarDevice;
        if (is_later) {
            check_memory(scalar, size_of(type), "ncclRedOpCreatePreMulSum");
        }
        ncclResult_t const result = ready(member);
        if (result == ncclSuccess) {
            int const name = static_cast<int>(ncclNumOps) + member.operators++;
            double factor = 1.0;
            joinable_tests::visit_real(dtype(type), [&]<class T>(std::type_identity<T>) {
                if (is_later) {
                    return;
                }
                T value;
                std::memcpy(&value, scalar, sizeof(T));
                if constexpr (std::is_class_v<T>) {
                    factor = static_cast<double>(static_cast<float>(value));
                } else {
                    factor = static_cast<double>(value);
                }
            });
            member.factors[name] = {type, factor, is_later ? scalar : nullptr};
            *op = static_cast<ncclRedOp_t>(name);
        }
        return result;
    });
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    std::lock_guard const lock{mutex()};
    if (member_of(comm, "ncclRedOpDestroy").factors.erase(op) == 0) {
        die("ncclRedOpDestroy was given an operator that is none");
    }
    return begin("ncclRedOpDestroy");
}

} // extern "C"
