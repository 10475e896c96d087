#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Breaks rules of the library one at a time, and checks that the tests which claim them fail.

  python3 tests/mutate.py [--list] [--compiler C++] [--jobs N] [NAME...]

Each mutation replaces one text of one header. Its test files are compiled without optimisation beside
that header and run: a test that fails, crashes or does not end kills the mutation. A misuse of fail/
kills it if the compiler no longer says what the misuse expects. A mutation that survives shows a rule
without a test. First the same tests run on the library as it is, and have to pass. A mutation that does
not compile, or whose text is not in its header exactly once, is an error, as is one that leaves a test
file without a test to run. Takes minutes, so CI only checks the texts and that the tests exist: run it by
hand after a rule or its test has changed.
"""
import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"  # has nccl.h, too
TORCH = "/usr/include/torch/csrc/api/include"  # beside the compiler's own folders
LIMIT = 150  # seconds, for tests that end in some


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    header: str  # below include/joinable
    old: str
    new: str
    tests: str  # files below tests/joinable, separated by spaces; one with a main() runs as it is
    cases: str = "*"  # doctest's filter


MUTATIONS = [
    # -- one model on several devices of a rank ----------------------------------------------------------
    Mutation(
        "a-guard-shortens-the-deadline-of-another-device", "communicator/per_device.hpp",
        "before = (std::max)(before, comm->set_deadline(deadline));",
        "auto const one = comm->set_deadline(deadline); before = comm == communicators_.front() ? one : before;",
        "communicator/nccl/per_device.test.cpp", "a guard with a timeout*",
    ),
    Mutation(
        "one-device-is-kept-alive", "communicator/per_device.hpp",
        "            comm->keep_alive();", "            comm->keep_alive();\n            return;",
        "communicator/nccl/per_device.test.cpp", "a rank that stays away*",
    ),
    Mutation(
        "ranks-are-missing-on-the-first-device-alone", "communicator/per_device.hpp",
        "if (std::vector<int> missing = comm->missing_ranks(); !missing.empty()) {",
        "if (std::vector<int> missing = comm->missing_ranks(); true) {",
        "communicator/nccl/per_device.test.cpp", "the ranks that either GPU*",
    ),
    Mutation(
        "dense-copies-get-memory-in-each-round", "device/impl/elements_on_host.ipp",
        "if (dense.bytes() < bytes) {", "if (dense.bytes() < 2 * bytes) {",
        "device/cuda/per_device.test.cpp", "replicas are compared in memory*",
    ),
    Mutation(
        "a-device-is-waited-for-without-a-deadline", "device/cuda/device.hpp",
        "if (waited >= deadline_) {", "if (false) {",
        "device/cuda/device.test.cpp", "a copy to the host ends at the deadline*",
    ),
    Mutation(
        "a-query-of-a-device-hides-an-error", "device/cuda/device.hpp",
        "detail::require_no_cuda_error();", "",
        "device/cuda/device.test.cpp", "a copy to the host tells an error*",
    ),
    Mutation(
        "the-device-of-nccl-is-waited-for-apart", "communicator/nccl/detail/device.hpp",
        "rank_.wait_for(stream());", "CudaDevice::wait_for_stream();",
        "communicator/nccl/data_parallel.test.cpp", "*a rank*fails*",
    ),
    Mutation(
        "pinned-memory-is-on-a-device", "device/cuda/device.hpp",
        "found.type == cudaMemoryTypeHost ||", "false ||",
        "device/cuda/per_device.test.cpp", "a communicator is that of a device*",
    ),
    Mutation(
        "memory-elsewhere-goes-by-the-first-device", "communicator/per_device.hpp",
        "devices_.at(position).id() != device", "false",
        "device/cuda/per_device.test.cpp", "a communicator is that of a device*",
    ),
    Mutation(
        "kernels-of-several-devices-are-one-device-s", "bucket/compression/detail/steps.hpp",
        "device.id().kind == DeviceKind::several", "false",
        "device/cuda/per_device.test.cpp", "a reduction with memory of its own*",
    ),
    Mutation(
        "all-buckets-lie-on-the-first-device", "bucket/impl/bucket.ipp",
        "memory_.allocate(bytes[k], k / dtype_count)", "memory_.allocate(bytes[k], 0)",
        "device/cuda/per_device.test.cpp", "one model over two devices*",
    ),
    Mutation(
        "all-collectives-go-by-the-first-device", "communicator/per_device.hpp",
        "has_memory ? at(devices_.id_of(buffer.data))", "false && has_memory ? at(devices_.id_of(buffer.data))",
        "device/cuda/per_device.test.cpp", "one model over two devices*",
    ),
    Mutation(
        "pieces-of-two-devices-share-memory", "bucket/impl/broadcast_coalesced.ipp",
        "2 * memory_.device().position(device) + p % 2", "p % 2",
        "device/cuda/per_device.test.cpp", "values and attached state*",
    ),
    Mutation(
        "only-the-first-device-submits", "device/several.hpp",
        "        on_each([](Device& device) { device.submit(); });", "        devices_.front()->submit();",
        "device/cuda/per_device.test.cpp", "one model over two devices*",
    ),
    Mutation(
        "a-device-that-fails-keeps-others-from-submitting", "device/several.hpp",
        "            if (!first) {\n                first = error;",
        "            if (error) {\n                std::rethrow_exception(error);",
        "device/cuda/per_device.test.cpp", "what one device cannot submit*",
    ),
    Mutation(
        "the-last-device-s-error-counts", "device/several.hpp",
        "            if (!first) {\n                first = error;",
        "            if (error) {\n                first = error;",
        "device/cuda/per_device.test.cpp", "what one device cannot submit*",
    ),
    Mutation(
        "only-the-first-device-is-waited-for", "device/several.hpp",
        "        on_each([](Device& device) { device.finish(); });", "        devices_.front()->finish();",
        "device/cuda/per_device.test.cpp", "an operation on either device*",
    ),
    Mutation(
        "only-the-first-device-needs-kernels", "device/several.hpp",
        "can_scale() const noexcept override {\n        return std::all_of(",
        "can_scale() const noexcept override {\n        return std::any_of(",
        "device/cuda/per_device.test.cpp", "kernels on one device alone*",
    ),
    Mutation(
        "an-abort-ends-one-device", "communicator/per_device.hpp",
        "            comm->abort(reason);", "            comm->abort(reason);\n            return;",
        "device/cuda/per_device.test.cpp", "an abort of the whole*",
    ),
    Mutation(
        "an-abort-of-another-device-is-not-seen", "communicator/per_device.hpp",
        "std::any_of(communicators_.begin()", "std::all_of(communicators_.begin()",
        "device/cuda/per_device.test.cpp", "an abort of one*",
    ),
    Mutation(
        "ranks-may-place-a-parameter-anywhere", "participant/detail/impl/model_checks.ipp",
        "position == 0 ? std::string{}", "position != 7 ? std::string{}",
        "device/cuda/per_device.test.cpp", "ranks that place*",
    ),
    Mutation(
        "a-device-without-a-communicator", "tensor/traits.hpp",
        "(these.index >> device.index & 1) != 0", "device.index >= 0",
        "device/cuda/per_device.test.cpp", "*on a third device is refused*",
    ),
    Mutation(
        "two-communicators-of-one-device", "device/several.hpp",
        "if (!is_usable || detail::is_among(one, id_)) {", "if (!is_usable) {",
        "device/cuda/per_device.test.cpp", "communicators of one device*",
    ),
    Mutation(
        "communicators-of-other-ranks", "communicator/per_device.hpp",
        "other->rank() != rank() || other->size() != size()", "false",
        "device/cuda/per_device.test.cpp", "communicators of one device*",
    ),
    Mutation(
        "elements-are-read-by-the-first-device", "device/impl/elements_on_host.ipp",
        "device_.at(position)", "device_.at(0)",
        "device/cuda/per_device.test.cpp", "replicas are compared*",
    ),
    # -- groups of ranks in one guard -------------------------------------------------------------------
    Mutation(
        "a-group-has-the-contributors-of-all", "join/groups.hpp",
        "round.contributor_count_ = static_cast<int>(group.contributors);", "",
        "participant/groups.test.cpp", "the same with groups*",
    ),
    Mutation(
        "local-steps-of-a-group-need-averages", "join/groups.hpp",
        "all.steps && !all.leaves_local", "all.steps",
        "participant/groups.test.cpp", "local SGD over groups*",
    ),
    Mutation(
        "groups-do-not-sum-weights", "join/groups.hpp",
        "            group.communicator->sum(words);", "",
        "participant/groups.test.cpp", "a model of all ranks*",
    ),
    Mutation(
        "a-group-without-an-active-rank-steps", "join/detail/impl/session.ipp",
        "own.active_count_ != 0 || own.contributor_count_ != 0", "own.number_ + 1 != 0",
        "participant/groups.test.cpp", "a model of all ranks*",
    ),
    Mutation(
        "a-group-forgets-what-was-carried", "join/groups.hpp",
        "group.active == 0 ? may_be_carried", "group.active == 0 ? false",
        "participant/groups.test.cpp", "the same with groups*",
    ),
    Mutation(
        "places-in-groups-are-not-counted", "join/groups.hpp",
        "= ranks_without_group(places);", "= {};",
        "participant/groups.test.cpp", "groups that overlap*",
    ),
    Mutation(
        "ranks-of-another-guard-are-in-a-group", "join/groups.hpp",
        "has_others |= members[k + 1] != guard;", "",
        "participant/groups.test.cpp", "groups that overlap*",
    ),
    Mutation(
        "groups-hear-of-no-abort", "join/detail/guard_outcome.hpp",
        "        for (ControlCommunicator* communicator : communicators_) {", "        for (ControlCommunicator* communicator : {communicators_.front()}) {",
        "participant/groups.test.cpp", "a throw at any point*",
    ),
    Mutation(
        "groups-hear-of-those-who-heard", "join/detail/guard_outcome.hpp",
        "if (auto const first = control().abort_reason()) {", "if (auto const first = std::optional<AbortReason>{}) {",
        "participant/groups.test.cpp", "a group hears why its guard*",
    ),
    Mutation(
        "groups-do-not-hear-of-roll-calls-that-have-failed", "join/detail/impl/session.ipp",
        "the roll calls have failed already\n    }", "the roll calls have failed already\n        return;\n    }",
        "participant/groups.test.cpp", "a group hears why its guard*",
    ),
    # -- state that a group shares ----------------------------------------------------------------------
    Mutation(
        "guards-do-not-end-groups-of-shards", "join/detail/impl/guard.ipp",
        "        add(entrants_[place]->shards.get());\n", "",
        "participant/hybrid_sharding.test.cpp", "a rank that throws*",
    ),
    Mutation(
        "groups-of-shards-are-not-known", "join/groups.hpp",
        "{&own, shards}", "{&own}",
        "participant/hybrid_sharding.test.cpp", "a rank that*",
    ),
    Mutation(
        "owners-of-rows-in-all-groups-are-summed", "participant/sharded/optimizer.hpp",
        "(has_groups() ? shard_words_ : words()).sum", "words().sum",
        "participant/hybrid_sharding.test.cpp", "owners in groups send*",
    ),
    Mutation(
        "groups-load-other-states", "participant/sharded/optimizer.hpp",
        "        require_same_state(state, from_rank);\n", "",
        "participant/hybrid_sharding.test.cpp", "state is gathered*",
    ),
    Mutation(
        "each-group-writes-its-state", "participant/sharded/optimizer.hpp",
        "return has_first != 0;", "return true;",
        "participant/hybrid_sharding.test.cpp", "a checkpoint of groups*",
    ),
    Mutation(
        "the-group-alone-votes-for-the-step", "participant/sharded/detail/before_step.hpp",
        "auto const ranks = static_cast<std::uint64_t>(words.size());",
        "auto const ranks = static_cast<std::uint64_t>(comm_.size());",
        "participant/hybrid_sharding.test.cpp", "before_step sums*",
    ),
    Mutation(
        "ranks-differ-in-whether-groups-share", "participant/sharded/optimizer.hpp",
        '        compared.add("groups of ranks share the state", has_groups());\n', "",
        "participant/hybrid_sharding.test.cpp", "mistakes*",
    ),
    Mutation(
        "groups-clip-by-their-own-sums", "participant/sharded/detail/before_step.hpp",
        "if (words_->size() != comm_.size()) {", "if (false) {",
        "participant/hybrid_sharding.test.cpp", "groups of different sizes*",
    ),
    Mutation(
        "guards-do-not-compare-who-shares-a-state", "join/groups.hpp",
        '        list.add("groups that share a state (0: all ranks, or none)", shards_);\n', "",
        "participant/hybrid_sharding.test.cpp", "mistakes*",
    ),
    Mutation(
        "failed-steps-end-the-own-group-alone", "participant/sharded/optimizer.hpp",
        "if (has_groups() && detail::session_of(join_state_) == nullptr) {", "if (false) {",
        "participant/hybrid_sharding.test.cpp", "a rank that throws in a step outside*",
    ),
    Mutation(
        "groups-load-other-settings", "participant/sharded/optimizer.hpp",
        "if (has_groups()) { // a rule", "if (false) { // a rule",
        "participant/hybrid_sharding.test.cpp", "groups that load settings*",
    ),
    Mutation(
        "states-come-from-ranks-that-a-group-lacks", "participant/sharded/optimizer.hpp",
        '            state_.check_rank("from_rank", from_rank, shards_.size());\n', "",
        "participant/hybrid_sharding.test.cpp", "a rank that a smaller*",
    ),
    Mutation(
        "groups-of-shards-are-used-beside-a-guard", "participant/sharded/zero_redundancy_optimizer.hpp",
        "        detail::require_listed(this->join_state(), this->shard_communicator(), join_name());\n", "",
        "participant/hybrid_sharding.test.cpp", "mistakes*",
    ),
    # -- gradients that are rows -----------------------------------------------------------------------
    Mutation(
        "rows-are-multiplied-before-they-are-added", "bucket/detail/impl/sparse_gradients.ipp",
        "    copy(rows.values, rows_of(sparse, raw_).values);", "    scale_copy(rows.values, factor_, rows_of(sparse, raw_).values);",
        "bucket/sparse.test.cpp", "*",
    ),
    Mutation(
        "rows-of-one-index-are-not-added", "bucket/detail/impl/sparse_gradients.ipp",
        "from.indices[order_[last]] == from.indices[order_[first]]", "false",
        "bucket/sparse.test.cpp", "all ranks get the sum*",
    ),
    Mutation(
        "rows-are-added-in-any-order", "bucket/detail/impl/sparse_gradients.ipp",
        "order_[k] * bytes", "order_[first + last - 1 - k] * bytes",
        "bucket/sparse.test.cpp", "*",
    ),
    Mutation(
        "the-last-index-may-be-out-of-range", "bucket/detail/impl/sparse_gradients.ipp",
        "static_cast<std::uint64_t>(index) >= sparse.extents[0]", "static_cast<std::uint64_t>(index) > sparse.extents[0]",
        "bucket/sparse.test.cpp", "rows that do not fit*",
    ),
    Mutation(
        "joined-ranks-keep-rows", "bucket/impl/gradients.ipp",
        "                } else if (has(i)) {\n                    clear_rows(i);\n", "                } else if (false) {\n",
        "bucket/sparse.test.cpp", "all ranks get the sum*",
    ),
    Mutation(
        "guards-give-dropped-rows-back", "bucket/impl/gradients.ipp",
        "                } else if (has(i)) {\n", "                } else {\n",
        "bucket/sparse.test.cpp", "a rank without a pass*",
    ),
    Mutation(
        "untouched-rows-are-overwritten", "bucket/detail/sparse_gradients.hpp",
        "if (receives_) {", "{",
        "bucket/sparse.test.cpp", "rows of the last own round*",
    ),
    Mutation(
        "rows-outlive-their-reducer", "bucket/impl/gradients.ipp",
        "travels_as_rows(i) ? sparse_.is_resident(i) : is_resident(i)", "!sparse_.has(i) && is_resident(i)",
        "bucket/sparse.test.cpp", "rows of the last own round*",
    ),
    Mutation(
        "iterations-go-on-without-rows", "bucket/reducer.hpp",
        "has_lost_average_ = true; // unless this one returns", "",
        "bucket/sparse.test.cpp", "an iteration whose rows*",
    ),
    Mutation(
        "indices-may-change-when-they-are-ready", "participant/detail/impl/ready_check.ipp",
        "elements ^ elements_.hash(indices)", "elements",
        "bucket/sparse.test.cpp", "a gradient of rows that still*",
    ),
    Mutation(
        "a-rank-that-weighs-nothing-sends-rows", "bucket/impl/gradients.ipp",
        "factor == 0.0 ? sparse_.zero(i) : sparse_.pack(i);", "sparse_.pack(i);",
        "bucket/sparse.test.cpp", "indices of 32 bits*",
    ),
    Mutation(
        "rows-that-a-rank-did-not-mark-are-sent-again", "bucket/reducer.hpp",
        "        for_each_sparse([&](std::size_t i) { iteration_.take_unused(i); });\n", "",
        "bucket/sparse.test.cpp", "*",
    ),
    Mutation(
        "rows-of-16-bits-are-rounded-at-each-addition", "bucket/detail/impl/sparse_gradients.ipp",
        "if constexpr (sizeof(T) == 2) {", "if constexpr (sizeof(T) == 1) {",
        "bucket/sparse.test.cpp", "rows of 16 bits*",
    ),
    Mutation(
        "rows-of-16-bits-as-dense-are-rounded-at-each-addition", "bucket/detail/impl/sparse_gradients.ipp",
        "bool const is_half = is_any && is_half_precision(rows.values.dtype());", "bool const is_half = false;",
        "bucket/sparse.test.cpp", "rows of 16 bits*",
    ),
    Mutation(
        "rows-as-dense-add-to-what-the-bucket-has", "bucket/detail/impl/sparse_gradients.ipp",
        "    fill_zero(place);\n    for (std::size_t k = 0; is_any", "    for (std::size_t k = 0; is_any",
        "bucket/sparse.test.cpp", "rows as dense gradients*",
    ),
    Mutation(
        "rows-that-lie-in-the-bucket-are-added-to-it", "bucket/detail/impl/sparse_gradients.ipp",
        "if (is_any && is_all_of(i, place)) {", "if (false) {",
        "bucket/sparse.test.cpp", "a pass may add rows*",
    ),
    Mutation(
        "rows-as-dense-are-not-scaled", "bucket/impl/gradients.ipp",
        "            device().scale_copy(*places_[i], factor, *places_[i]);\n", "",
        "bucket/sparse.test.cpp", "rows as dense gradients need*",
    ),
    Mutation(
        "joined-ranks-keep-rows-as-dense", "bucket/impl/gradients.ipp",
        "            zero(i);\n            hand_back(i);\n", "",
        "bucket/sparse.test.cpp", "rows as dense gradients are the sums*",
    ),
    Mutation(
        "engines-keep-rows-where-buckets-were", "bucket/impl/gradients.ipp",
        "        for (std::size_t const i : residents) {\n            hand_back(i);", "        for (std::size_t const i : residents) {\n            static_cast<void>(i);",
        "bucket/sparse.test.cpp", "a pass may add rows*",
    ),
    Mutation(
        "untouched-rows-as-dense-are-overwritten", "bucket/impl/gradients.ipp",
        "return parameters_[i].can_set_grad() || sparse_.has(i);", "return parameters_[i].can_set_grad();",
        "bucket/sparse.test.cpp", "rows as dense gradients stay*",
    ),
    Mutation(
        "rows-as-dense-need-all-gather", "bucket/impl/gradients.ipp",
        "sparse_.empty() || is_sparse_dense_ ?", "sparse_.empty() ?",
        "bucket/sparse.test.cpp", "rows as dense gradients need*",
    ),
    Mutation(
        "rows-beside-a-dense-gradient-are-dropped", "bucket/impl/gradients.ipp",
        "if (sparse_.has(i) && parameters_[i].sparse_grad().values.numel() != 0) {", "if (false) {",
        "bucket/sparse.test.cpp", "rows that do not fit a dense*",
    ),
    Mutation(
        "owners-send-no-rows", "participant/sharded/detail/exchange.hpp",
        "        if (!rows.indices.empty()) {\n", "        if (false) {\n",
        "participant/sparse_sharding.test.cpp", "an owner sends*",
    ),
    Mutation(
        "rows-travel-with-others", "optimizer/impl/partition.ipp",
        "own >= alone || parameters[i].is_sparse()", "own >= alone",
        "participant/sparse_sharding.test.cpp", "sharded embeddings*",
    ),
    Mutation(
        "rows-side-by-side-are-stepped-apart", "optimizer/impl/shard.ipp",
        "gradients + first * row * element(),", "gradients + (last - 1) * row * element(),",
        "participant/sparse_sharding.test.cpp", "an owner sends*",
    ),
    Mutation(
        "rows-may-come-twice", "optimizer/impl/shard.ipp",
        "listed[k] > (k == 0 ? -1 : listed[k - 1])", "listed[k] >= (k == 0 ? 0 : listed[k - 1])",
        "participant/sparse_sharding.test.cpp", "rows that an owner cannot*",
    ),
    Mutation(
        "rules-step-rows-whatever-their-settings", "optimizer/update_rule.hpp",
        "            return value == 1;", "            return true;",
        "participant/sparse_sharding.test.cpp", "sharded training that cannot*",
    ),
    Mutation(
        "rules-that-step-rows-are-not-looked-at-again", "participant/sharded/detail/plan.hpp",
        "        if (shard.bucket().is_rows) {", "        if (false) {",
        "participant/sparse_sharding.test.cpp", "sharded training that cannot*",
    ),
    Mutation(
        "joined-owners-step-no-rows", "optimizer/stepped_gradients.hpp",
        "elements_of_gradient(parameters[i]) ? 1 : 0", "parameters[i].grad() ? 1 : 0",
        "participant/sparse_sharding.test.cpp", "sharded embeddings*",
    ),
    Mutation(
        "ranks-do-not-compare-which-gradients-are-rows", "participant/detail/impl/model_checks.ipp",
        'parameters[i].is_sparse() ? ", sparse gradients" : ""', '""',
        "bucket/sparse.test.cpp", "ranks agree*",
    ),
    # -- gradients of f32 beside values of 16 bits --------------------------------------------------
    Mutation(
        "buckets-have-the-dtype-of-values", "tensor/parameters.hpp",
        "    DType const dtype = grad_dtype(parameters, i);", "    DType const dtype = value.dtype();",
        "bucket/wide_gradients.test.cpp", "gradients of f32 beside*",
    ),
    Mutation(
        "a-gradient-that-is-there-says-nothing", "tensor/parameters.hpp",
        "return gradient && fits(gradient.dtype()) ? gradient.dtype() : own;", "return own;",
        "bucket/wide_gradients.test.cpp", "a gradient that is there*",
    ),
    Mutation(
        "ranks-do-not-compare-what-gradients-are", "participant/detail/impl/model_checks.ipp",
        "if (value && grad_dtype(parameters, i) != value.dtype()) {", "if (false) {",
        "bucket/wide_gradients.test.cpp", "what gradients are to be*",
    ),
    Mutation(
        "owners-step-gradients-of-another-dtype", "participant/sharded/detail/plan.hpp",
        "if (list[i].requires_grad() && grad_dtype(list, i) != list[i].value().dtype()) {", "if (false) {",
        "bucket/wide_gradients.test.cpp", "sharded training refuses*",
    ),
    # -- booleans, i16, u16 and complex numbers ------------------------------------------------------
    Mutation(
        "integers-of-16-bits-are-reduced", "tensor/reduce_op.hpp",
        "all[i] = dtype_table[i].size != 2 ?", "all[i] = true ?",
        "communicator/collectives.test.cpp", "booleans*",
    ),
    Mutation(
        "collectives-read-devices-as-the-host", "communicator/collectives.hpp",
        "device != DeviceId{}", "false && device != DeviceId{}",
        "communicator/collectives.test.cpp", "tensors on a device are refused*",
    ),
    Mutation(
        "complex-products-are-of-parts", "reduction/lanes.hpp",
        "a = {{ac - bd, ad + bc}};", "a = {{ac, bd}};",
        "reduction/reduce.test.cpp", "complex numbers*",
    ),
    Mutation(
        "pairs-of-reals-keep-the-strides-of-complex-numbers", "tensor/any_view.hpp",
        "strides.push_back(2 * stride);", "strides.push_back(stride);",
        "device/copy.test.cpp", "kernels between*",
    ),
    Mutation(
        "files-name-numbers-of-8-bits-as-unknown", "checkpoint/detail/safetensors.hpp",
        'word.starts_with("F8")', "false",
        "checkpoint/detail/safetensors.test.cpp", "numbers of 8 bits*",
    ),
    Mutation(
        "files-of-complex-values-read-as-reals", "checkpoint/detail/model_layout.hpp",
        "if (is_complex != tensor.is_complex && (is_complex || is_ours(header))) {", "if (false) {",
        "checkpoint/complex.test.cpp", "complex values*",
    ),
    Mutation(
        "complex-gradients-are-seen-as-they-are", "tensor/parameters.hpp",
        "if (pointer && detail::is_complex(joinable::dtype(*pointer))) {", "if (false) {",
        "participant/complex_parameters.test.cpp", "complex gradients*",
    ),
    # -- in which order the elements of a tensor lie ------------------------------------------------
    Mutation(
        "column-major-types-have-row-major-strides", "tensor/tensor.hpp",
        "return column_major_strides(joinable::extents(tensor));",
        "return row_major_strides(joinable::extents(tensor));",
        "tensor/tensor.test.cpp", "*column-major*",
    ),
    Mutation(
        "collectives-take-any-dense-order", "tensor/tensor.hpp",
        "return joinable::is_contiguous(joinable::extents(tensor), joinable::strides(tensor));",
        "return joinable::is_contiguous(joinable::extents(tensor), joinable::strides(tensor)) ||\n"
        "            joinable::is_contiguous(detail::reversed(joinable::extents(tensor)), "
        "detail::reversed(joinable::strides(tensor)));",
        "tensor/tensor.test.cpp", "*column-major*",
    ),
    Mutation(
        "the-order-of-a-type-is-ignored", "tensor/tensor.hpp",
        "concept is_column_major = requires { requires traits_of<T>::is_column_major; };",
        "concept is_column_major = false && requires { requires traits_of<T>::is_column_major; };",
        "tensor/tensor.test.cpp", "*column-major*",
    ),
    # -- what a guard that is over, or not enabled, still says ---------------------------------------
    Mutation(
        "a-refused-round-opens-when-it-is-waited-for-again", "join/detail/impl/session.ipp",
        "        outcome_.require_alive();\n    }\n    hear_verdict();", "    }\n    hear_verdict();",
        "join/failure.test.cpp", "a round that was refused*",
    ),
    Mutation(
        "a-guard-forgets-why-its-roll-calls-ended", "join/detail/guard_outcome.hpp",
        "        failure_ = reason;\n", "",
        "join/failure.test.cpp", "what ended a guard*",
    ),
    Mutation(
        "reading-in-a-handler-forgets-its-failure", "join/detail/guard.hpp",
        "if (!std::current_exception()) {", "if (true) {",
        "join/guarded_range.test.cpp", "a handler that reads its element again*",
    ),
    Mutation(
        "rounds-open-in-post-hooks", "join/detail/impl/session.ipp",
        "if (has_ended_) { // the others", "if (false) { // the others",
        "join/failure.test.cpp", "a round in a post hook*",
    ),
    Mutation(
        "a-pass-that-is-run-again-is-a-round", "join/detail/local_rounds.hpp",
        "if (opens && is_again) {", "if (false) {",
        "participant/window.test.cpp", "*a pass that is run again*",
    ),
    Mutation(
        "a-second-model-that-runs-again-opens-a-round", "join/detail/local_rounds.hpp",
        "bool const is_kept = is_again &&", "bool const is_kept = false &&",
        "participant/window.test.cpp", "*a second model runs its pass again*",
    ),
    Mutation(
        "refused-passes-take-rounds-back", "join/detail/local_rounds.hpp",
        "opened_.reset(); // once, also if it is refused", "",
        "participant/window.test.cpp", "*a pass that is refused is not a round*",
    ),
    Mutation(
        "rounds-without-the-first-participant-are-not-counted", "join/detail/local_rounds.hpp",
        "|| begins_another(position, notice);", ";",
        "join/guard.test.cpp", "participants of different rounds*",
    ),
    # -- windows that a user discards, and who has one model twice ----------------------------------
    Mutation(
        "what-was-reduced-stays-announced", "join/detail/impl/session.ipp",
        "is_round_open && rounds_.announced_window().is_open()", "rounds_.announced_window().is_open()",
        "participant/window.test.cpp", "after a window was reduced*",
    ),
    Mutation(
        "windows-are-discarded-in-a-round", "join/joinable.hpp",
        "state_.session_->require_between_rounds();", "",
        "participant/window.test.cpp", "discard_window() is refused*",
    ),
    Mutation(
        "optimizers-keep-a-batch-that-a-loop-announced", "participant/sharded/zero_redundancy_optimizer.hpp",
        "window.end(); // also", "// also",
        "participant/window.test.cpp", "an optimizer that averages alone forgets*",
    ),
    Mutation(
        "captured-steps-divide-by-windows-of-others", "participant/captured/captured_step.hpp",
        "if (round.accumulated_rounds() != 0) {", "if (false) {",
        "communicator/nccl/captured_step.test.cpp", "a captured step is refused after rounds*",
    ),
    Mutation(
        "objects-without-memory-are-claimed-twice", "join/impl/parameter_claims.ipp",
        "        shared = same_object(claims);\n", "",
        "participant/guarded_optimizers.test.cpp", "two participants that average*",
    ),
    Mutation(
        "a-message-costs-the-way-back-too", "communicator/algorithms/measure_costs.hpp",
        "seconds / 2 * (has_peer", "seconds * (has_peer",
        "communicator/algorithms/measure_costs.test.cpp", "measured costs are*",
    ),
    Mutation(
        "ranks-without-a-peer-count", "communicator/algorithms/measure_costs.hpp",
        "(has_peer ? 1 : 0)", "1",
        "communicator/algorithms/measure_costs.test.cpp", "a rank without a peer*",
    ),
    Mutation(
        "each-rank-has-its-own-costs", "communicator/algorithms/measure_costs.hpp",
        "        over_.all_reduce({times_.data(), times_.size(), DType::f64}, ReduceOp::sum).wait();", "",
        "communicator/algorithms/measure_costs.test.cpp", "measured costs choose for*",
    ),
    Mutation(
        "alpha-includes-the-bytes", "communicator/algorithms/measure_costs.hpp",
        "shorter - short_bytes / costs.bytes_per_second", "shorter",
        "communicator/algorithms/measure_costs.test.cpp", "measured costs are*",
    ),
    Mutation(
        "overlap-is-not-measured", "communicator/algorithms/measure_costs.hpp",
        "costs.overlap = overlap_of(exchanged, combine, median_of(exchange_and_addition));", "",
        "communicator/algorithms/measure_costs.test.cpp", "what an addition adds*",
    ),
    Mutation(
        "slow-links-are-made-to-carry-long-messages", "communicator/algorithms/measure_costs.hpp",
        "cached * times_longer * 3 > patience", "false",
        "communicator/algorithms/measure_costs.test.cpp", "long messages are measured*",
    ),
    Mutation(
        "handles-of-device-memory-forget-where-it-begins", "device/cuda/shared_handle.hpp",
        "static_cast<std::byte*>(block->data) + words[8]", "static_cast<std::byte*>(block->data)",
        "device/cuda/shared_handle.test.cpp", "processes read and write*",
    ),
    Mutation(
        "opened-device-memory-is-on-the-host", "communicator/shared_buffer.hpp",
        "return {std::move(memory), handle.count(), device};", "return {std::move(memory), handle.count()};",
        "device/cuda/shared_handle.test.cpp", "processes read and write*",
    ),
    Mutation(
        "a-mesh-wraps-around", "communicator/algorithms/detail/message_schedule.hpp",
        "rings_.push_back({stride, extent, is_mesh});", "rings_.push_back({stride, extent});",
        "communicator/algorithms/message_schedule.test.cpp", "in a mesh*",
    ),
    Mutation(
        "a-mesh-goes-back-as-it-came", "communicator/algorithms/detail/ring.hpp",
        ": 2 * (extent - 1 - position) + 1;", ": 2 * (position - (extent + 1) / 2) + 1;",
        "communicator/algorithms/message_schedule.test.cpp", "*",
    ),
    Mutation(
        "messages-hide-that-ranks-share-memory", "communicator/algorithms/communicator.hpp",
        "requires detail::has_model_table<Comm>", "requires(!detail::has_model_table<Comm>)",
        "participant/shared_models.test.cpp", "thread ranks behind any*",
    ),
    Mutation(
        "forked-processes-deregister-memory-of-nccl", "communicator/nccl/detail/arenas.hpp",
        "rank_.is_here() && rank_.handle() != nullptr", "rank_.handle() != nullptr",
        "communicator/nccl/failure.test.cpp", "a process that a rank over NCCL has forked*",
    ),
    Mutation(
        "forked-processes-free-memory-of-nccl", "communicator/nccl/detail/arenas.hpp",
        "block != nullptr && home.is_here()", "block != nullptr",
        "communicator/nccl/failure.test.cpp", "a process that a rank over NCCL has forked*",
    ),
    Mutation(
        "forked-processes-end-communicators-of-nccl", "communicator/nccl/detail/rank.hpp",
        "if (!is_here()) { // there neither", "if (false) { // there neither",
        "communicator/nccl/failure.test.cpp", "a process that a rank over NCCL has forked*",
    ),
    # -- libtorch's modules -------------------------------------------------------------------------
    Mutation(
        "hooks-lost-by-a-conversion-are-not-noticed", "interop/torch.hpp",
        "if (auto const i = gradients_.unwatched()) {", "if (std::optional<std::size_t> const i; i) {",
        "interop/torch.test.cpp", "a module that was converted and back*",
    ),
    Mutation(
        "buffers-of-torchscript-are-those-of-the-start", "interop/torch.hpp",
        "concat(part.name, \".\", name), {}, object, slot",
        "concat(part.name, \".\", name), object->getSlot(slot).toTensor()",
        "interop/torch_script.test.cpp", "a buffer that a TorchScript pass*",
    ),
    Mutation(
        "buffers-that-are-none-at-first-come-late", "interop/torch.hpp",
        "(one.object || one.tensor.defined()) &&", "one.now().defined() &&",
        "interop/torch_script.test.cpp", "a TorchScript buffer that is None at first*",
    ),
    Mutation(
        "buffers-that-became-none-are-errors-of-the-engine", "interop/torch.hpp",
        "if (object && !value.defined()) {", "if (false) {",
        "interop/torch_script.test.cpp", "each mistake with a TorchScript module*",
    ),
    Mutation(
        "half-of-a-buffer-that-may-be-none-is-ignored", "interop/torch.hpp",
        "buffers.push_back({one.name, one.now()});", "buffers.push_back({one.name, {}});",
        "interop/torch_script.test.cpp", "each mistake with a TorchScript module*",
    ),
    Mutation(
        "buffers-are-sent-into-what-autograd-reads", "interop/torch.hpp",
        "&& !(storage == value.storage().getWeakStorageImpl())) {", "&& false) {",
        "interop/torch_script.test.cpp", "what a TorchScript pass puts into a buffer*",
    ),
    Mutation(
        "autograd-reads-buffers-of-another-rank", "interop/torch.hpp",
        "now().unsafeGetTensorImpl()->bump_version();", "",
        "interop/torch_buffers.test.cpp", "libtorch refuses to read what a pass saved*",
    ),
    Mutation(
        "buffers-that-were-sent-before-the-pass-count-as-overwritten", "interop/torch.hpp",
        "if (buffer_sync_ == BufferSync::after_forward) {", "if (buffer_sync_) {",
        "interop/torch_buffers.test.cpp", "autograd reads a buffer as the pass saw it*",
    ),
    Mutation(
        "refreshed-buffers-are-written-where-a-pass-read", "interop/torch.hpp",
        "one.storage = former.storage;", "",
        "interop/torch_script.test.cpp", "what a TorchScript pass puts into a buffer*",
    ),
    Mutation(
        "refreshed-modules-are-not-followed", "interop/torch.hpp",
        "        unused_.clear();\n        watch();\n", "        unused_.clear();\n",
        "interop/torch_refresh.test.cpp", "a module that freezes*",
    ),
    Mutation(
        "refused-uses-of-all-values-end-the-pass", "interop/torch_sharded.hpp",
        "        auto held = Base::use_all();", "        forget_scopes();\n        auto held = Base::use_all();",
        "interop/torch_sharded.test.cpp", "a refused use_all*",
    ),
    Mutation(
        "values-set-anew-are-told-by-their-address", "interop/torch.hpp",
        "return this->has_new_value(i); }", "return i > 99; }",
        "interop/torch_refresh.test.cpp", "a value that was set anew*",
    ),
    Mutation(
        "layers-added-to-a-module-are-not-noticed", "interop/torch.hpp",
        "if (!known.contains(one.identity())) {", "if (false) {",
        "interop/torch.test.cpp", "a layer that a module got*",
    ),
    Mutation(
        "late-buffers-of-a-module-are-not-noticed", "interop/torch.hpp",
        'require_listed("buffer", buffers_, distinct_buffers(module_, ignore_));', "",
        "interop/torch_refresh.test.cpp", "a late layer of frozen parameters*",
    ),
    Mutation(
        "threads-of-autograd-take-no-turns", "interop/torch.hpp",
        "        std::lock_guard const lock{in_use_};\n        require_no_graph(i);\n",
        "        require_no_graph(i);\n",
        "interop/torch_devices.test.cpp", "autograd's threads of two devices*",
    ),
    Mutation(
        "reductions-that-failed-are-begun-again", "interop/torch.hpp",
        "if (std::exchange(has_begun_, true)) {", "if (false) {",
        "interop/torch.test.cpp", "a reduction that could not begin*",
    ),
    Mutation(
        "errors-of-autograd-leave-while-a-hook-runs", "interop/torch.hpp",
        "            std::lock_guard const lock{in_use_}; // a thread of a device may still be in a hook\n", "",
        "interop/torch.test.cpp", "an error of a backward pass*",
    ),
    Mutation(
        "models-end-while-a-hook-runs", "interop/torch.hpp",
        "            std::lock_guard const lock{in_use_}; // until a thread of autograd has left its hook\n", "",
        "interop/torch.test.cpp", "an error of a backward pass*",
    ),
    Mutation(
        "streams-of-one-device-wait-for-autograd", "interop/torch.hpp",
        "if (!device.is_cpu() && caller_of(device) == callers_.end()) {",
        "if (!device.is_cpu() && callers_.empty()) {",
        "interop/torch_devices.test.cpp", "autograd's threads of two devices*",
    ),
    Mutation(
        "gradient-penalties-end-the-pass", "interop/torch.hpp",
        "if (life->state == Life::State::lasts && gradients_.are_accumulated()) {",
        "if (life->state == Life::State::lasts) {",
        "interop/torch.test.cpp", "a gradient penalty*",
    ),
    Mutation(
        "gradients-beyond-the-graph-get-the-engine-s-text", "interop/torch.hpp",
        "std::binary_search(unused_.begin(), unused_.end(), i)) {", "false) {",
        "interop/torch_upstream.test.cpp", "layers that run again are refused*",
    ),
    Mutation(
        "hooks-pile-up-on-returned-parameters", "interop/torch.hpp",
        "return gradients_.watches(tensor); // a hook", "return false; // a hook",
        "interop/torch.test.cpp", "no hooks pile up*",
    ),
    Mutation(
        "gradients-of-modules-end-with-the-buckets", "interop/torch.hpp",
        "        views_->leave();\n", "",
        "interop/torch.test.cpp", "handles and views of gradients outlive*",
    ),
    Mutation(
        "bools-of-torch-are-bytes", "interop/torch_tensor.hpp",
        "case c10::ScalarType::Bool: return DType::boolean;", "case c10::ScalarType::Bool: return DType::u8;",
        "interop/torch.test.cpp", "tensors of bools have no sum*",
    ),
    Mutation(
        "complex-tensors-of-torch-are-refused", "interop/torch_tensor.hpp",
        "    case c10::ScalarType::ComplexDouble: return DType::c128;\n", "",
        "interop/torch.test.cpp", "complex parameters are averaged*",
    ),
    Mutation(
        "static-graphs-of-modules-are-told-what-is-unused", "interop/torch.hpp",
        ".finds_unused = options.find_unused && !options.static_graph", ".finds_unused = options.find_unused",
        "interop/torch_drawn.test.cpp", "any training of a libtorch module*",
    ),
    Mutation(
        "cleared-rows-of-a-module-have-any-dimensions", "interop/torch.hpp",
        "if (gradient->_nnz() == 0) {", "if (false) {",
        "interop/torch_module.test.cpp", "rows that zero_grad() cleared*",
    ),
    Mutation(
        "gradients-of-modules-may-have-graphs", "interop/torch.hpp",
        "gradient.defined() && gradient.requires_grad()) {", "false && gradient.defined()) {",
        "interop/torch_mistakes.test.cpp", "each mistake of a libtorch user*",
    ),
    Mutation(
        "gradients-that-are-views-are-averaged-in-the-memory-of-others", "interop/torch.hpp",
        "take_apart(tensor.mutable_grad(), made);", "static_cast<void>(made);",
        "interop/torch_gradients.test.cpp",
    ),
    Mutation(
        "views-are-taken-for-the-only-ones-of-their-tensor", "interop/torch.hpp",
        "if (is_held || gradient.storage()", "static_cast<void>(is_held); if (gradient.storage()",
        "interop/torch_gradients.test.cpp", "*views of one*",
    ),
    Mutation(
        "gradients-that-others-hold-are-told-by-views-only", "interop/torch.hpp",
        "if (is_held || gradient.storage().use_count() > (is_view ? 3U : 2U)) {", "if (is_held) {",
        "interop/torch_gradients.test.cpp",
    ),
    Mutation(
        "gradients-of-linear-layers-are-copied", "interop/torch.hpp",
        "(is_view ? 3U : 2U)", "2U",
        "interop/torch_gradients.test.cpp", "*that nobody else reads*",
    ),
    Mutation(
        "models-of-modules-may-end-before-their-backward-pass", "interop/torch.hpp",
        "if (state == State::ended_in_a_round && accumulates) {", "if (false && accumulates) {",
        "interop/torch_mistakes.test.cpp", "each mistake of a libtorch user*",
    ),
    Mutation(
        "ignored-parameters-are-averaged", "interop/torch.hpp",
        "tensor.defined() && !is_named(torch_name_of(item), ignore) &&", "tensor.defined() &&",
        "interop/torch_module.test.cpp", "what options.ignore names*",
    ),
    Mutation(
        "joined-ranks-drop-what-they-accumulated-of-ignored", "interop/torch.hpp",
        "if (round.will_sync() && !round.contributes() && !ddp_.leaves_joined_untouched()) {",
        "if (round.will_sync() && !ddp_.leaves_joined_untouched()) {",
        "interop/torch_module.test.cpp", "a joined rank keeps what*",
    ),
    Mutation(
        "rounds-that-do-not-sync-drop-ignored-gradients", "interop/torch.hpp",
        "if (round.will_sync() && !round.contributes() && !ddp_.leaves_joined_untouched()) {",
        "if (!round.contributes() && !ddp_.leaves_joined_untouched()) {",
        "interop/torch_module.test.cpp", "a joined rank keeps what*",
    ),
    Mutation(
        "joined-ranks-step-ignored-gradients-again", "interop/torch.hpp",
        "if (round.will_sync() && !round.contributes() && !ddp_.leaves_joined_untouched()) {",
        "if (false) {",
        "interop/torch_module.test.cpp", "a joined rank keeps what*",
    ),
    Mutation(
        "computed-parameters-are-trained", "interop/torch.hpp",
        "if (!one.tensor.is_leaf()) {", "if (false) {",
        "interop/torch_mistakes.test.cpp", "each mistake of a libtorch user*",
    ),
    Mutation(
        "holders-without-a-module-are-for-their-rank-alone", "interop/torch.hpp",
        "return abort_if_throws(comm, [&] { return buffers_of(torch_module_of(module), ignore); });",
        "return buffers_of(torch_module_of(module), ignore);",
        "interop/torch_mistakes.test.cpp", "each mistake of a libtorch user*",
    ),
    Mutation(
        "untouched-joined-ranks-drop-ignored-gradients", "interop/torch.hpp",
        " && !ddp_.leaves_joined_untouched()) {", ") {",
        "interop/torch_module.test.cpp", "a joined rank whose gradients stay untouched*",
    ),
    Mutation(
        "names-to-ignore-may-name-nothing", "interop/torch.hpp",
        "        if (!is_found) {", "        if (false && !is_found) {",
        "interop/torch_module.test.cpp", "a name of nothing*",
    ),
    Mutation(
        "ranks-may-ignore-different-names", "participant/detail/impl/model_checks.ipp",
        '    list.add("ignore", options.ignore);\n', "",
        "interop/torch_module.test.cpp", "ranks that ignore different names*",
    ),
    Mutation(
        "half-of-a-tied-parameter-is-ignored", "interop/torch.hpp",
        "if (!is_new && is_ignored !=", "if (false && is_ignored !=",
        "interop/torch_module.test.cpp", "a tied parameter is ignored*",
    ),
    Mutation(
        "names-to-ignore-of-a-list-are-forgotten", "participant/data_parallel.hpp",
        "if (!options.ignore.empty() || !options.sparse.empty()) {", "if (false) {",
        "participant/agreement.test.cpp", "names of tensors are refused*",
    ),
    Mutation(
        "embeddings-are-not-found-in-modules", "interop/torch.hpp",
        "if (embedding != nullptr && embedding->options.sparse()) {", "if (false) {",
        "interop/torch_module.test.cpp", "an embedding on its own*,a sparse gradient is the mean*",
    ),
    Mutation(
        "rows-of-a-module-lie-in-the-memory-of-the-reducer", "interop/torch.hpp",
        "detail::tensor_over(rows.values, options).clone(),", "detail::tensor_over(rows.values, options),",
        "interop/torch_module.test.cpp", "sparse gradients of embeddings have the bits*",
    ),
    Mutation(
        "rows-of-a-module-are-not-coalesced", "interop/torch.hpp",
        "._coalesced_(true);", "._coalesced_(false);",
        "interop/torch_module.test.cpp", "sparse gradients of embeddings have the bits*",
    ),
    Mutation(
        "tuples-of-torchscript-are-not-looked-into", "interop/torch.hpp",
        "if (value.isTuple()) {", "if (false) {",
        "interop/torch_script.test.cpp", "a TorchScript module trains*",
    ),
    Mutation(
        "lists-of-torchscript-are-not-looked-into", "interop/torch.hpp",
        "if (value.isList()) {", "if (false) {",
        "interop/torch_script.test.cpp", "find_unused looks into*",
    ),
    Mutation(
        "dictionaries-of-torchscript-are-not-looked-into", "interop/torch.hpp",
        "if (value.isGenericDict()) {", "if (false) {",
        "interop/torch_script.test.cpp", "find_unused looks into*",
    ),
    Mutation(
        "names-of-sparse-parameters-are-forgotten", "interop/torch.hpp",
        "if (is_named(torch_name_of(item), names)) {", "if (false && is_named(torch_name_of(item), names)) {",
        "interop/torch_module.test.cpp", "a parameter that is no embedding is named*",
    ),
    Mutation(
        "libtorch-gets-no-settings-of-another-rank", "participant/sharded/detail/settings.hpp",
        "            apply_settings_of(rule);\n", "",
        "participant/local_optimizer.test.cpp", "an engine's optimizer steps all*",
    ),
    Mutation(
        "a-rank-alone-lacks-memory-for-its-former-buckets", "participant/sharded/data_parallel.hpp",
        "former_.reserve(former_.size() + 1);", "",
        "../trace/allocations.test.cpp", "a model or an optimizer that is out of memory*",
    ),
    Mutation(
        "a-rank-alone-refuses-a-group-while-it-holds-values", "participant/sharded/data_parallel.hpp",
        "                this->hooks().require_released();\n", "",
        "participant/sharded_parameters.test.cpp", "a group is added on no rank*",
    ),
    Mutation(
        "optimizers-that-step-at-once-step-buckets", "participant/sharded/data_parallel.hpp",
        "if (detail::steps_all_at_once<Rule>) {", "if (false) {",
        "participant/local_optimizer.test.cpp", "what an engine's optimizer cannot*",
    ),
    Mutation(
        "engines-state-begins-anew-in-each-step", "optimizer/shard.hpp",
        "state_.array(k, place_of_state(piece));", "state_.array(k, 0);",
        "participant/local_optimizer.test.cpp", "an engine's optimizer steps all*",
    ),
    Mutation(
        "files-do-not-say-which-optimizer-of-libtorch", "interop/torch_optimizer.hpp",
        'list.add("optimizer", class_name<O>());', "",
        "interop/torch_optimizer.test.cpp", "a checkpoint of libtorch's Adam is not read*",
    ),
    Mutation(
        "factories-may-leave-aside-their-tensors", "interop/torch_optimizer.hpp",
        "static_cast<std::size_t>(stepped) != own.size()) {", "false) {",
        "interop/torch_optimizer.test.cpp", "a factory that leaves aside*",
    ),
    Mutation(
        "conjugated-gradients-stay-views", "interop/torch.hpp",
        "if (gradient.is_conj() || gradient.is_neg()) {", "if (gradient.is_neg()) {",
        "interop/torch.test.cpp", "the gradient of a complex parameter*",
    ),
    Mutation(
        "a-first-state-of-libtorch-is-forgotten", "interop/torch_optimizer.hpp",
        "if constexpr (requires { Traits::first_state(value, settings_.numbers); }) {", "if constexpr (false) {",
        "interop/torch_optimizer.test.cpp", "sharded*libtorch's optimizers*",
    ),
    Mutation(
        "state-of-libtorch-is-not-where-checkpoints-look", "interop/torch_optimizer.hpp",
        "                    over(array).copy_(tensor);\n", "",
        "interop/torch_optimizer.test.cpp", "a checkpoint has*,sharded*libtorch's optimizers*",
    ),
    Mutation(
        "steps-of-a-file-are-not-given-to-libtorch", "interop/torch_optimizer.hpp",
        ".step(static_cast<std::int64_t>(parameter.step) - 1);", ".step();",
        "interop/torch_optimizer.test.cpp", "a checkpoint has*",
    ),
    Mutation(
        "state-before-the-first-step-is-that-of-another-training", "interop/torch_optimizer.hpp",
        "states.erase(key_of(value)); // the step makes it", ";",
        "interop/torch_optimizer.test.cpp", "a checkpoint from before the first step*",
    ),
    Mutation(
        "settings-are-not-given-to-libtorch", "interop/torch_optimizer.hpp",
        "setting = static_cast<T>(settings_.numbers[k++]);", "static_cast<void>(setting);",
        "interop/torch_optimizer.test.cpp", "a scheduler of libtorch*",
    ),
    Mutation(
        "optimizers-of-libtorch-step-in-host-memory", "interop/torch_optimizer.hpp",
        "bool const is_on_host = view.device().kind == DeviceKind::host;", "bool const is_on_host = true;",
        "interop/torch_devices.test.cpp", "libtorch's Adam steps on each GPU*",
    ),
    Mutation(
        "values-of-modules-come-back-on-the-host", "interop/torch_sharded.hpp",
        "is_there ? tensor.device() : c10::Device{c10::kMeta};",
        "is_there ? c10::Device{c10::kCPU} : c10::Device{c10::kMeta};",
        "interop/torch_devices.test.cpp", "a sharded libtorch module trains on GPUs*",
    ),
    Mutation(
        "norms-to-clip-to-may-differ", "interop/torch_sharded.hpp",
        "if (largest != mine) {", "if (false) {",
        "interop/torch_sharded.test.cpp", "ranks that clip one step differently*",
    ),
    Mutation(
        "smaller-norms-to-clip-to-are-taken", "interop/torch_sharded.hpp",
        "std::array const mine{max_norm, -max_norm, norm_type, -norm_type};",
        "std::array const mine{max_norm, -1.0, norm_type, -norm_type};",
        "interop/torch_sharded.test.cpp", "ranks that clip one step differently*",
    ),
    Mutation(
        "values-of-modules-keep-their-memory", "interop/torch_sharded.hpp",
        "        storage.set_nbytes(bytes);\n", "",
        "interop/torch_values.test.cpp", "values of a libtorch module that ranks keep in parts*",
    ),
    Mutation(
        "graphs-of-other-threads-are-followed", "interop/torch_sharded.hpp",
        "if (number != none && node.thread_id() != at::RecordFunction::currentThreadId()) {", "if (false) {",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "buffers-of-types-without-a-name-are-refused", "interop/torch.hpp",
        "            case 4: return DType::u32;\n", "",
        "interop/torch.test.cpp", "buffers and frozen parameters of any type*",
    ),
    Mutation(
        "a-step-of-lbfgs-compiles", "interop/torch.hpp",
        "        !is_of_one_direction,\n", "        true,\n",
        "../fail/torch_step_of_one_direction.cpp",
    ),
    Mutation(
        "released-values-of-modules-are-read", "interop/torch_sharded.hpp",
        "library.fallback(::torch::CppFunction::makeFromBoxedFunction<&refuse>());",
        "library.fallback(::torch::CppFunction::makeFallthrough());",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "held-values-of-modules-are-gathered-late", "interop/torch_sharded.hpp",
        "other.units.back() > scope.units.front()", "other.units.back() > scope.units.front() + 1",
        "interop/torch_values.test.cpp", "values that a pass of libtorch holds*",
    ),
    Mutation(
        "values-of-modules-stay-for-what-began-later", "interop/torch_sharded.hpp",
        "other.begin < scope.end", "true",
        "interop/torch_values.test.cpp", "the values of two layers*",
    ),
    Mutation(
        "released-values-of-modules-are-saved", "interop/torch_sharded.hpp",
        "is_there ? tensor.device() : c10::Device{c10::kMeta};", "tensor.device();",
        "interop/torch_values.test.cpp", "torch::save and torch::load take values*",
    ),
    Mutation(
        "evaluations-of-modules-in-parts-make-graphs", "interop/torch_sharded.hpp",
        "!this->hooks().gathers_values() || this->stage_ != Base::Stage::idle;", "true;",
        "interop/torch_values.test.cpp", "an evaluation of a libtorch module in parts*",
    ),
    Mutation(
        "evaluations-of-whole-modules-make-no-graph", "interop/torch_sharded.hpp",
        "!this->hooks().gathers_values() || this->stage_ != Base::Stage::idle;",
        "this->stage_ != Base::Stage::idle;",
        "interop/torch_values.test.cpp", "an evaluation of a libtorch module in parts*",
    ),
    Mutation(
        "values-of-another-type-are-set", "interop/torch_sharded.hpp",
        "!joinable::detail::is_like(now, view)", "false",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "values-of-another-layout-are-set", "interop/torch_sharded.hpp",
        "!joinable::detail::has_same_steps(now, view)", "false",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "values-within-a-storage-are-set", "interop/torch_sharded.hpp",
        "p.tensor.storage_offset() != 0", "false",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "frozen-values-count-as-freed", "interop/torch_sharded.hpp",
        "            if (!one.tensor.requires_grad()) {\n                find(one);",
        "            if (!one.tensor.requires_grad()) {\n                freed.emplace(find(one), one.name);",
        "interop/torch_values.test.cpp", "buffers and frozen parameters of a libtorch module*",
    ),
    Mutation(
        "buffers-share-freed-memory", "interop/torch_sharded.hpp",
        "        std::for_each(buffers.begin(), buffers.end(), find);\n", "        static_cast<void>(buffers);\n",
        "interop/torch_values.test.cpp", "buffers and frozen parameters of a libtorch module*",
    ),
    Mutation(
        "gradients-of-passed-units-are-waited-for", "interop/torch_sharded.hpp",
        "while (passed_ > 0 && first_uses_[passed_ - 1] > node) {", "while (false) {",
        "interop/torch_values.test.cpp", "layers that a pass or a loss*",
    ),
    Mutation(
        "values-of-modules-stay-until-the-backward-pass-ends", "interop/torch_sharded.hpp",
        "            if (scope.begin > node) {\n                scope.values.clear();",
        "            if (false) {\n                scope.values.clear();",
        "interop/torch_values.test.cpp", "the values of two layers*",
    ),
    Mutation(
        "graphs-of-earlier-passes-read-values", "interop/torch_sharded.hpp",
        "if (pass != scopes_->pass) {", "if (false) {",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "values-are-used-without-gradients", "interop/torch_sharded.hpp",
        "if (scopes_->is_forward && !at::GradMode::is_enabled() &&", "if (false &&",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "skipped-batches-of-modules-hold-values", "interop/torch_sharded.hpp",
        "        forget_scopes();\n        Base::skip(notice);", "        Base::skip(notice);",
        "interop/torch_values.test.cpp", "a batch that fails in a pass of a libtorch module in parts*",
    ),
    Mutation(
        "parts-of-larger-tensors-are-freed", "interop/torch_sharded.hpp",
        "if (tensor.requires_grad() &&\n", "if (false &&\n",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "gradients-are-taken-of-values-in-parts", "interop/torch.hpp",
        "if (!gradients_.are_accumulated()) {\n", "if (false) {\n",
        "interop/torch_values.test.cpp", "each mistake with values*",
    ),
    Mutation(
        "unused-parameters-of-sharded-modules-are-not-sent", "interop/torch_sharded.hpp",
        ".steps_unused = true", ".steps_unused = false",
        "interop/torch_sharded.test.cpp", "a sharded libtorch module trains*",
    ),
    Mutation(
        "joined-ranks-do-not-clip-for-libtorch", "interop/torch_sharded.hpp",
        "            options.shared.emplace_back(clip->all);\n", "",
        "interop/torch_sharded.test.cpp", "a sharded libtorch module trains*",
    ),
    Mutation(
        "norms-of-libtorch-are-clipped-in-all-later-steps", "interop/torch_sharded.hpp",
        "std::exchange(clip->all.is_due, false)", "clip->is_due",
        "interop/torch_sharded.test.cpp", "a norm is clipped in one step*",
    ),
    Mutation(
        "samplers-deal-the-same-to-all-ranks", "interop/torch_data.hpp",
        "mine_[i] = shuffle_ ? order[positions[i]] : positions[i];", "mine_[i] = shuffle_ ? order[i] : positions[i];",
        "interop/torch_data.test.cpp", "the samplers of all ranks*",
    ),
    Mutation(
        "epochs-of-a-sampler-have-one-order", "interop/torch_data.hpp",
        "            ++shuffle_->epoch;\n", "",
        "interop/torch_data.test.cpp", "the samplers of all ranks*",
    ),
    Mutation(
        "clones-of-sync-batch-norms-share-running-means", "interop/torch_sync_batch_norm.hpp",
        'running_mean = register_buffer("running_mean", at::zeros({channels}));',
        'running_mean = register_buffer("running_mean", running_mean.defined() ? running_mean : at::zeros({channels}));',
        "interop/torch_sync_batch_norm.test.cpp", "a clone of a model with*",
    ),
    Mutation(
        "a-loaded-sampler-passes-over-an-epoch", "interop/torch_data.hpp",
        "is_loaded_ = false;\n        std::size_t const end", "std::size_t const end",
        "interop/torch_data.test.cpp", "a loaded sampler that*",
    ),
    Mutation(
        "a-loaded-sampler-begins-its-epoch-again", "interop/torch_data.hpp",
        "is_drawn_ = next_ != 0;", "next_ = 0;",
        "interop/torch_data.test.cpp", "a sampler that is loaded*",
    ),
    Mutation(
        "the-number-that-a-loaded-sampler-has-begins-again", "interop/torch_data.hpp",
        "&& count.value_or(count_) == count_) {", "&& !count.has_value()) {",
        "interop/torch_data.test.cpp", "a loaded sampler that is reset to the number*",
    ),
    Mutation(
        "iterate-reads-a-batch-of-a-loader-twice", "join/guarded_range.hpp",
        "return (LooksAhead ? current_ : next_).get();", "return *position_;",
        "join/input_iterator.test.cpp", "iterate() reads a loader*",
    ),
    Mutation(
        "a-star-takes-one-letter", "interop/detail/names.hpp",
        "n = ++taken;", "return false;",
        "interop/names.test.cpp", "a star of a pattern*",
    ),
    # -- the bits of a reduction --------------------------------------------------------------------
    Mutation(
        "a-nan-is-lost-in-a-min-or-max", "reduction/lanes.hpp",
        "std::numeric_limits<Float>::quiet_NaN()", "std::numeric_limits<Float>::infinity()",
        "reduction/reduce.test.cpp", "a min or max of floats*",
    ),
    Mutation(
        "the-min-of-zeros-is-positive", "reduction/lanes.hpp",
        "? result | other :", "? result & other :",
        "reduction/reduce.test.cpp", "a min or max of floats*",
    ),
    Mutation(
        "a-max-that-is-nan-has-other-bits-than-a-min", "reduction/lanes.hpp",
        "Bits{} | (quiet ^ static_cast<Word>(flip))", "Bits{} | quiet",
        "reduction/reduce.test.cpp", "a min or max of floats*",
    ),
    Mutation(
        "unsigned-integers-are-compared-as-signed", "reduction/lanes.hpp",
        "compares && std::signed_integral<T>", "!compares && std::signed_integral<T>",
        "reduction/reduce.test.cpp", "a reduction gives the bits*",
    ),
    # -- what a rank throws if the exchange of errors fails, too ------------------------------------
    Mutation(
        "a-failed-exchange-hides-the-own-error", "communicator/failure_report.hpp",
        "std::rethrow_exception(local_error ? local_error : std::current_exception());", "throw;",
        "agreement/agree.test.cpp", "a rank that has no memory*",
    ),
    Mutation(
        "an-own-error-is-hidden-where-others-do-not-enter", "join/detail/impl/session.ipp",
        "throw_if_any_failed(local_error, exchange,", "throw_if_any_failed({}, exchange,",
        "join/entry.test.cpp", "a rank that cannot enter says why*",
    ),
    # -- whose ranks a failure names ----------------------------------------------------------------
    Mutation(
        "guards-believe-the-numbers-of-a-group", "join/detail/guard_outcome.hpp",
        "return is_ours ? reason : failure_in_group(std::move(reason));", "return is_ours ? reason : reason;",
        "join/failure_in_group.test.cpp", "the failure of a*",
    ),
    Mutation(
        "guards-over-a-group-do-not-believe-it", "communicator/control.hpp",
        "return !reason.is_renumbered || is_renumbered() || is_aborted();", "return !reason.is_renumbered;",
        "join/failure_in_group.test.cpp", "a guard over a group*",
    ),
    Mutation(
        "guards-do-not-say-that-they-are-over-a-group", "communicator/failure_report.hpp",
        "all.is_renumbered = control_.is_renumbered();", "all.is_renumbered = false;",
        "join/failure_in_group.test.cpp", "a guard over a smaller group*",
    ),
    Mutation(
        "agreements-believe-the-numbers-of-a-group", "agreement/agree.hpp",
        "control.may_have_thrown(reason) ? reason : failure_in_group(reason);", "reason;",
        "agreement/agree.test.cpp", "a local error that names ranks of a group*",
    ),
    Mutation(
        "losses-in-a-group-hide-its-numbers", "communicator/shared_memory/group/group.hpp",
        "return board_->here(ended_by().value_or(reason_of_leaving(peer)));",
        "return ended_by().value_or(reason_of_leaving(peer));",
        "communicator/shared_memory/split.test.cpp", "differences and leaving in a group*",
    ),
    Mutation(
        "differences-in-a-group-hide-its-numbers", "communicator/shared_memory/engine/impl/endpoint.ipp",
        "throw_failure(board_.here(*reason));", "throw_failure(*reason);",
        "communicator/shared_memory/split.test.cpp", "differences and leaving in a group*",
    ),
    Mutation(
        "a-group-that-meets-hides-its-numbers", "communicator/tcp/impl/communicator.ipp",
        "around.is_renumbered\n        );", "false\n        );",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that does not answer is that of a group*",
    ),
    Mutation(
        "a-guard-does-not-know-staged-words", "communicator/nccl/staged.hpp",
        "return comm_.identity();", "return this;",
        "communicator/nccl/staged.test.cpp", "a guard knows the NCCL*",
    ),
    Mutation(
        "sizes-in-a-group-hide-its-numbers", "communicator/detail/impl/checks.ipp",
        "throw Mismatch{ranks, text, is_renumbered};", "throw Mismatch{ranks, text};",
        "communicator/shared_buffer.test.cpp", "ranks of a group that share*",
    ),
    Mutation(
        "sizes-in-a-group-of-threads-hide-its-numbers", "communicator/shared_memory/impl/thread.ipp",
        "check_same_size(sizes, is_renumbered());", "check_same_size(sizes, false);",
        "communicator/shared_buffer.test.cpp", "ranks of a group that share*",
    ),
    Mutation(
        "sizes-in-a-group-of-processes-hide-its-numbers", "communicator/detail/shared_mapping.hpp",
        "check_same_size(all, is_renumbered_group(comm));", "check_same_size(all, false);",
        "communicator/shared_buffer.test.cpp", "ranks of a group that share*",
    ),
    Mutation(
        "only-the-first-rank-of-a-group-counts", "detail/failure.hpp",
        "return member != rank++;", "return rank++ == 0 && member != 0;",
        "join/failure_in_group.test.cpp", "a group says whether*",
    ),
    Mutation(
        "a-refused-part-is-not-told", "join/detail/impl/session.ipp",
        "recorded([&] { begin_part(position, notice); });", "begin_part(position, notice);",
        "join/failure.test.cpp", "what a guard refuses*",
    ),
    Mutation(
        "a-refused-vote-is-not-told", "join/detail/guard.hpp",
        "recorded([&] { session_.vote_stop(); });", "session_.vote_stop();",
        "join/failure.test.cpp", "what a guard refuses*",
    ),
    Mutation(
        "a-refused-look-ahead-is-not-told", "join/detail/impl/guard.ipp",
        "recorded([&] { session_.look_ahead(notice); });", "session_.look_ahead(notice);",
        "join/failure.test.cpp", "what a guard refuses*",
    ),
    Mutation(
        "a-handled-exception-hides-the-text-of-fail", "join/detail/session.hpp",
        "outcome_.fail_with(text);", "outcome_.forget();\n        outcome_.record(text);",
        "join/failure.test.cpp", "guard.fail(text)*",
    ),
    Mutation(
        "votes-are-lost-where-nothing-carries-them", "join/detail/impl/session.ipp",
        "if (!options_.enable) {", "if (false) {",
        "join/failure.test.cpp", "a guard that is not enabled has no roll call*",
    ),
    Mutation(
        "who-disturbs-an-announced-round-is-not-named", "join/detail/impl/session.ipp",
        "bool const is_other = caller && caller != opener;", "bool const is_other = false;",
        "join/failure.test.cpp", "a participant that is missing? out of turn*",
    ),
    Mutation(
        "a-vote-after-the-end-is-lost", "join/detail/impl/session.ipp",
        "void Session::vote_stop() {\n    outcome_.require_alive();", "void Session::vote_stop() {",
        "join/failure.test.cpp", "a vote after the end*",
    ),
    Mutation(
        "own-residuals-alone-are-read", "checkpoint/detail/model_layout.hpp",
        "for (; rank < writers; rank += ranks) {", "if (rank < writers) {",
        "checkpoint/reductions.test.cpp", "what ranks of a file*",
    ),
    Mutation(
        "residuals-of-more-ranks-stay", "checkpoint/checkpoint.hpp",
        "device.upload(sum.data(), to.data(), bytes);",
        "if (!parts.empty()) { device.upload(sum.data(), to.data(), bytes); }",
        "checkpoint/reductions.test.cpp", "what ranks of a file*",
    ),
    Mutation( # the fake's device memory ends the host that touches it
        "residuals-of-devices-are-summed-by-the-host", "checkpoint/checkpoint.hpp",
        "device.upload(sum.data(), to.data(), bytes);", "std::copy_n(sum.data(), bytes, static_cast<std::byte*>(to.data()));",
        "communicator/nccl/checkpoint.test.cpp", "residuals on devices*",
    ),
    Mutation(
        "buckets-of-a-file-are-cut-as-given", "bucket/reducer.hpp",
        "            cut_anew();\n        }\n    }\n\n    /// Whether the last", "        }\n    }\n\n    /// Whether the last",
        "checkpoint/reductions.test.cpp", "a training whose reduction*",
    ),
    Mutation(
        "a-count-of-rounds-starts-anew", "checkpoint/checkpoint.hpp",
        "*model.reduction.counts[k].value = counts[k];", "",
        "checkpoint/reductions.test.cpp", "a training whose reduction*",
    ),
    Mutation(
        "a-warm-start-is-not-taken", "bucket/compression/power_sgd.hpp",
        "return byte != std::byte{0};", "return byte == std::byte{1} && byte == std::byte{2};",
        "checkpoint/reductions.test.cpp", "a training whose reduction*",
    ),
    # -- drawn trainings whose gradients travel compressed ---------------------------------------------
    Mutation(
        "residuals-do-not-travel", "bucket/compression/detail/feedback.hpp",
        "            to[i] += residual[i];\n", "",
        "participant/compression_property.test.cpp", "*",
    ),
    Mutation(
        "a-skipped-batch-contributes", "bucket/compression/int8.hpp",
        "Flag const flag = contributes ? 1 : 0;", "Flag const flag = contributes ? 0 : 1;",
        "participant/compression_property.test.cpp", "*",
    ),
    # -- what a training attaches, and values of other tools' files ------------------------------------
    Mutation(
        "what-is-attached-is-each-ranks-own", "checkpoint/checkpoint.hpp",
        "attach(detail::KeptTensor::Kind::own, name", "attach(detail::KeptTensor::Kind::same, name",
        "checkpoint/attached.test.cpp", "*",
    ),
    Mutation(
        "ranks-attach-what-they-like", "checkpoint/checkpoint.hpp",
        '        list.add("attached tensors", texts);\n', "",
        "checkpoint/attached.test.cpp", "what cannot be attached*",
    ),
    Mutation(
        "a-name-is-attached-twice", "checkpoint/checkpoint.hpp",
        "if (name.empty() || is_known) {", "if (name.empty()) {",
        "checkpoint/attached.test.cpp", "what cannot be attached*",
    ),
    Mutation(
        "masters-stay-when-values-are-read", "checkpoint/checkpoint.hpp",
        "return layout->has_value(parts, group, i);", "return false;",
        "checkpoint/attached.test.cpp", "values of another tool's file*",
    ),
    Mutation(
        "values-without-a-place-are-read", "checkpoint/detail/model_layout.hpp",
        "return !placed.contains(part.tensor);", "return placed.contains(0) && false;",
        "checkpoint/attached.test.cpp", "values are read by a list*",
    ),
    Mutation(
        "a-file-may-have-more-values", "checkpoint/detail/model_layout.hpp",
        "        if (names.empty()) {\n            require_none_left(file, header, stored);\n        }\n", "",
        "checkpoint/attached.test.cpp", "values are read by a list*",
    ),
    Mutation(
        "ranks-read-other-values", "checkpoint/checkpoint.hpp",
        '            list.add("names of values to read", names);\n', "",
        "checkpoint/attached.test.cpp", "values are read by a list*",
    ),
    Mutation(
        "a-file-has-the-values-of-a-joined-rank", "checkpoint/checkpoint.hpp",
        "write_file(round.buffer_source());", "write_file(0);",
        "checkpoint/reductions.test.cpp", "a file written in an uneven*",
    ),
    Mutation(
        "a-file-of-another-reduction", "checkpoint/detail/settings.hpp",
        "if (text(stored, name) != text(own, name)) {", "if (false) {",
        "checkpoint/reductions.test.cpp", "a file of another reduction*",
    ),
    Mutation(
        "a-file-of-a-reduction-with-other-settings", "checkpoint/detail/settings.hpp",
        "        if (!fits) {", "        if (false) {",
        "checkpoint/reductions.test.cpp", "a file of another reduction*",
    ),
    Mutation(
        "files-have-the-parameters-of-the-first-listing", "checkpoint/checkpoint.hpp",
        "before this rank may throw\n            list_parameters();", "before this rank may throw\n"
        "            if (zero_.groups().empty()) {\n                list_parameters();\n            }",
        "checkpoint/reductions.test.cpp", "a checkpoint of a model that was refreshed*",
    ),
    Mutation(
        "each-rank's-own-tensors-are-read-by-name", "checkpoint/detail/model_layout.hpp",
        "if (kept_[k].kind == KeptTensor::Kind::same && unknown.erase", "if (unknown.erase",
        "checkpoint/attached.test.cpp", "attached tensors are read by their names*",
    ),
    Mutation(
        "values-are-read-into-the-parameters-of-the-last-file", "checkpoint/checkpoint.hpp",
        "        list_parameters();\n        wait_for_work();", "        wait_for_work();",
        "checkpoint/reductions.test.cpp", "a checkpoint of a model that was refreshed*",
    ),
    Mutation(
        "a-parameter-that-no-file-has", "checkpoint/checkpoint.hpp",
        "!values.contains(value.data())", "false",
        "checkpoint/reductions.test.cpp", "a model whose optimizer*",
    ),
    Mutation(
        "a-file-has-the-settings-of-a-joined-rank", "checkpoint/checkpoint.hpp",
        "zero_.take_settings(round); // the loop may have set those of the next step", "",
        "checkpoint/checkpoint.test.cpp", "a file has the settings for*",
    ),
    Mutation(
        "a-file-has-the-settings-of-rank-0", "checkpoint/checkpoint.hpp",
        "detail::agree_on_rules(list, zero_.rules());", "",
        "checkpoint/checkpoint.test.cpp", "settings that differ*",
    ),
    Mutation(
        "gathered-settings-are-of-one-rank", "participant/sharded/optimizer.hpp",
        "detail::agree_on_rules(compared, rules_);", "",
        "checkpoint/checkpoint.test.cpp", "settings that differ*",
    ),
    Mutation(
        "a-rank-waits-alone-for-its-device-before-a-file", "checkpoint/checkpoint.hpp",
        "list.add(\"rounds\", rounds_);\n            wait_for_work();", "list.add(\"rounds\", rounds_);",
        "checkpoint/checkpoint.test.cpp", "a rank whose device fails*",
    ),
    Mutation(
        "ranks-compare-signatures-alone", "communicator/detail/comparison.hpp",
        "        if (!signature_.has_counts || std::exchange(has_tables_, true)) {",
        "        if (!signature_.has_counts || size_ != 0) {",
        "communicator/request.test.cpp", "ranks compare tables*",
    ),
    Mutation(
        "a-comparison-keeps-the-tables-of-the-last-one", "communicator/detail/comparison.hpp",
        "        has_tables_ = false;\n", "",
        "communicator/request.test.cpp", "ranks compare tables*",
    ),
    Mutation(
        "levels-keep-the-deadline-of-a-guard", "communicator/hierarchical/detail/engine.hpp",
        "bool const is_first = deadline == first_deadline_;", "bool const is_first = false;",
        "communicator/hierarchical/communicator.test.cpp", "after a guard with a timeout*",
    ),
    Mutation(
        "a-deadline-is-kept-by-one-level", "communicator/hierarchical/detail/engine.hpp",
        "if (!own_deadline(level) && level.size() > 1) {", "if (false) {",
        "communicator/hierarchical/communicator.test.cpp", "a deadline that one level*",
    ),
    Mutation(
        "a-fork-does-not-wait-for-a-connection-that-is-made", "communicator/detail/socket.hpp",
        "        ForkPause const pause;\n        socket.handle_ = make();\n        if (socket.is_open()) {",
        "        socket.handle_ = make();\n        ForkPause const pause;\n        if (socket.is_open()) {",
        "communicator/tcp/silence.test.cpp", "a process that is forked*",
    ),
    Mutation(
        "guards-blame-ranks-that-they-do-not-have", "join/detail/guard_outcome.hpp",
        "if (names_others(recorded_->ranks)) {", "if (false) {",
        "join/failure.test.cpp", "ranks that another communicator names*",
    ),
    Mutation(
        "a-split-is-an-all-gather-to-the-others", "communicator/shared_memory/group/impl/board_communicator.ipp",
        "request.signature.collective = split_collective;", "",
        "communicator/shared_memory/split.test.cpp", "a split that a rank does not call*",
    ),
    Mutation(
        "a-rank-alone-has-no-deadline", "communicator/self.hpp",
        "return std::exchange(deadline_, deadline);", "return deadline;",
        "join/attachments.test.cpp", "a rank alone takes a timeout*",
    ),
    Mutation(
        "a-text-is-cut-within-a-character", "detail/text.hpp",
        "(static_cast<unsigned char>(text[length]) & 0xc0U) == 0x80U", "false",
        "agreement/agree.test.cpp", "texts that are too long*",
    ),
    # -- what a job leaves behind -------------------------------------------------------------------
    Mutation(
        "a-leftover-of-another-size-blocks-a-job", "communicator/shared_memory/process/named_segment.hpp",
        "        if (!creator.has_died() && !creator.has_left()) {\n            require_size(its_size, size, path);",
        "        require_size(its_size, size, path);\n        if (!creator.has_died() && !creator.has_left()) {",
        "communicator/shared_memory/named_processes.test.cpp", "what a job left*",
    ),
    Mutation(
        "a-forked-process-listens-on", "communicator/tcp/detail/handshake_server.hpp",
        "~HandshakeServer() { listener_.end_listening(); }", "~HandshakeServer() = default;",
        "communicator/tcp/meeting.test.cpp", "the port is free*",
    ),
    # -- what a model refuses, and what ranks compare of it -----------------------------------------
    Mutation(
        "parameters-may-share-memory", "participant/detail/impl/model_checks.ipp",
        "if (shared) {", "if (false) {",
        "participant/data_parallel.test.cpp", "*listed twice*",
    ),
    Mutation(
        "values-may-share-memory", "participant/detail/impl/model_checks.ipp",
        'check_distinct(list, "", [](AnyParameter const& parameter) { return parameter.value(); });', "",
        "participant/data_parallel.test.cpp", "*listed twice*",
    ),
    Mutation(
        "gradients-may-share-memory", "participant/detail/impl/model_checks.ipp",
        'check_distinct(list, "the gradients of ", [](AnyParameter const& parameter) {\n'
        "        return parameter.grad();\n    });", "",
        "participant/data_parallel.test.cpp", "*listed twice*",
    ),
    Mutation(
        "dtypes-are-not-compared", "participant/detail/impl/model_checks.ipp",
        "std::string text = to_text(value) + text_of_place", "std::string text = to_text(value.extents()) + text_of_place",
        "participant/data_parallel.test.cpp", "models with another*",
    ),
    Mutation(
        "strides-of-one-element-differ-between-ranks", "participant/detail/impl/model_checks.ipp",
        "strides[d] = value.extents()[d] == 1 ? 1 : strides[d];", "",
        "participant/agreement.test.cpp", "each property of a parameter*",
    ),
    Mutation(
        "requires-grad-is-not-compared", "participant/detail/impl/model_checks.ipp",
        'text += parameters[i].requires_grad() ? "" : ", no requires_grad";', "",
        "participant/agreement.test.cpp", "parameters that differ in requires_grad*",
    ),
    Mutation(
        "guards-do-not-compare-models", "participant/detail/impl/model_checks.ipp",
        "list.hash_from(first)", "list.hash_from(list.items().size())",
        "participant/agreement.test.cpp", "two models of one shape*",
    ),
    Mutation(
        "values-at-null", "tensor/parameters.hpp",
        "if (!value || !is_there || !has_memory(value)) {",
        "if (!value || !is_there) {",
        "participant/data_parallel.test.cpp", "elements at a null pointer*",
    ),
    Mutation(
        "gradients-at-null", "tensor/parameters.hpp",
        "if (!has_memory(gradient)) {", "if (false) {",
        "participant/data_parallel.test.cpp", "*null pointer*,*loses its memory*",
    ),
    Mutation(
        "make-data-parallel-drops-options", "participant/data_parallel.hpp",
        "comm, std::forward<Parameters>(parameters), std::move(buffers), options\n    );",
        "comm, std::forward<Parameters>(parameters), std::move(buffers)\n    );",
        "participant/data_parallel.test.cpp", "make_data_parallel*",
    ),
    Mutation(
        "frozen-parameters-are-only-not-marked", "bucket/marks.hpp",
        "if (frozen.empty() && !parameters[i].requires_grad()) {", "if (false) {",
        "bucket/reducer.test.cpp", "a parameter that is frozen*",
    ),
    Mutation(
        "unfrozen-parameters-do-not-require", "bucket/marks.hpp",
        "return parameter.requires_grad()\n", "return false\n",
        "bucket/reducer.test.cpp", "a parameter that is frozen*",
    ),
    Mutation(
        "negative-weights-are-large", "join/detail/verdict.hpp",
        "return given < 0\n", "return false\n",
        "join/schedule.test.cpp", "a period of 0*",
    ),
    Mutation(
        "refused-views-take-values", "participant/sharded/optimizer.hpp",
        "group.values->leave();", "",
        "participant/bucket_values.test.cpp", "values that cannot lie in buckets*",
    ),
    Mutation(
        "a-setting-of-any-text", "checkpoint/detail/settings.hpp",
        'if (text != "true" && text != "false") {', "if (false) {",
        "checkpoint/checkpoint.test.cpp", "a file with a setting*",
    ),
    Mutation(
        "settings-that-depend-on-others", "checkpoint/detail/settings.hpp",
        "is_changed && pass < 3", "is_changed && pass < 1",
        "checkpoint/checkpoint.test.cpp", "settings of every type*",
    ),
    Mutation(
        "strides-beyond-the-memory", "tensor/shape.hpp",
        "if (bytes > storage_bytes) {", "if (false) {",
        "tensor/any_view.test.cpp", "strides that lead out*",
    ),
    Mutation(
        "a-model-may-train-nothing", "bucket/impl/bucket.ipp",
        "if (order.empty()) {", "if (false) {",
        "bucket/reducer.test.cpp", "a model that cannot be reduced*",
    ),
    Mutation(
        "what-was-frozen-later-looks-forgotten", "bucket/detail/impl/iteration.ipp",
        "is_frozen_now = is_frozen_now || (!finds_unused_ && is_missing(i) && is_frozen(i));",
        "static_cast<void>(i);",
        "participant/listed_model.test.cpp", "without find_unused a parameter*",
    ),
    Mutation(
        "names-may-be-returned-by-value", "detail/text.hpp",
        "(std::is_lvalue_reference_v<Text> ||", "(true || std::is_lvalue_reference_v<Text> ||",
        "detail/text.test.cpp", "a name that is returned by value*",
    ),
    Mutation(
        "the-search-for-a-difference-takes-a-message-for-each-item", "agreement/impl/agree.ipp",
        "for (std::size_t first = 0;; first += slot_count) {", "for (std::size_t first = 0;; ++first) {",
        "agreement/agree.test.cpp", "the first difference of very many*",
    ),
    Mutation(
        "the-search-for-a-difference-needs-one", "agreement/impl/agree.ipp",
        "words_ == decltype(words_){}; // no list has an item there", "first > 9 * slot_count;",
        "agreement/agree.test.cpp", "the search for a difference*",
    ),
    # -- ranks as processes ----------------------------------------------------------------------------
    Mutation(
        "ranks-lack-threads", "communicator/shared_memory/impl/run_processes.ipp",
        "if (others != 0 && !options.other_threads) {", "if (false) {",
        "communicator/shared_memory/process.test.cpp", "a process with other threads*",
    ),
    Mutation(
        "a-joined-thread-counts", "communicator/shared_memory/impl/run_processes.ipp",
        "for (; others > 0 && patience.count() > 0; --patience) {", "for (; false;) {",
        "communicator/shared_memory/process.test.cpp", "a process with other threads*",
    ),
    Mutation(
        "killed-ranks-are-not-said-to-lack-threads", "communicator/shared_memory/process/impl/child_processes.ipp",
        "if (killed_.empty() || other_threads_ == 0) {", "if (true) {",
        "communicator/shared_memory/process.test.cpp", "a rank that had to be killed*",
    ),
    Mutation(
        "ranks-keep-handles-of-earlier-ranks", "communicator/shared_memory/process/impl/child_processes.ipp",
        "            close(other.handle);\n", "",
        "communicator/shared_memory/process.test.cpp", "a rank has no more files open*",
    ),
    Mutation(
        "forks-are-not-counted", "communicator/detail/impl/home_process.ipp",
        "[] { ++forks(); }", "[] {}",
        "communicator/tcp/faults.test.cpp", "a process that a rank by TCP has forked*",
    ),
    Mutation(
        "forked-processes-end-groups-that-abort", "communicator/shared_memory/group/group_rank.hpp",
        "return group_here().is_aborted(", "return group_.is_aborted(",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked*",
    ),
    Mutation(
        "forked-processes-go-on-as-the-rank", "communicator/detail/impl/home_process.ipp",
        "if (!is_here()) {", "if (false) {",
        "communicator/tcp/faults.test.cpp", "a process that a rank by TCP has forked*",
    ),
    Mutation(
        "forked-processes-keep-connections", "communicator/detail/impl/socket.ipp",
        "                    ::close(handle);\n", "",
        "communicator/tcp/faults.test.cpp", "a rank that is killed is PeerFailed by TCP although*",
    ),
    Mutation(
        "forked-processes-close-files-of-others", "communicator/detail/impl/socket.ipp",
        "if (forks == own.forks) {", "if (true) {",
        "communicator/tcp/faults.test.cpp", "a process that a rank by TCP has forked*",
    ),
    Mutation(
        "forked-processes-leave-the-group", "communicator/shared_memory/group/impl/board_communicator.ipp",
        "if (!rank_.is_here()) {", "if (false) {",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked says*",
    ),
    Mutation(
        "forked-processes-finish-works", "communicator/detail/work_of.hpp",
        "if (rank_ == nullptr || !rank_->is_here()) {", "if (rank_ == nullptr) {",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked waits*",
    ),
    Mutation(
        "forked-processes-close-ranks-over-gloo", "communicator/gloo/communicator.hpp",
        "if (rank_->is_here()) {", "if (true) {",
        "communicator/gloo/failure.test.cpp", "a process that a rank over Gloo has forked*",
    ),
    Mutation(
        "the-thread-that-attached-is-the-rank", "communicator/shared_memory/process/members.hpp",
        "                    held->state.wait(State::held);\n"
        "                    held->member.leave();\n", "",
        "communicator/shared_memory/named_processes.test.cpp", "a rank lives on when*",
    ),
    Mutation(
        "the-curve-is-the-last-sample", "trace/impl/picture.ipp",
        "here.mean += (event.number() - here.mean) / static_cast<double>(++here.count);",
        "here.mean = event.number(); ++here.count;",
        "trace/picture.test.cpp", "a curve below the lanes*",
    ),
    Mutation(
        "a-limit-of-file-sizes-kills-a-rank-that-writes-a-trace", "trace/impl/gather.ipp",
        """require(!exceeds_file_limit(written), "write");""", "",
        "trace/gather.test.cpp", "a trace or a picture beyond the limit*",
    ),
    Mutation(
        "samples-that-are-no-numbers-are-drawn", "trace/impl/picture.ipp",
        "event.kind == TraceKind::sample && std::isfinite(event.number())", "event.kind == TraceKind::sample",
        "trace/picture.test.cpp", "a curve below the lanes*",
    ),
    Mutation(
        "samples-that-are-no-numbers-are-written", "trace/impl/trace.ipp",
        "if (std::isfinite(event.number())) {", "if (event.kind == TraceKind::sample) {",
        "trace/trace.test.cpp", "samples of all ranks reach rank 0*",
    ),
    Mutation(
        "pages-have-4-kib", "communicator/shared_memory/board/system.hpp",
        "static_cast<std::size_t>(sysconf(_SC_PAGESIZE))", "std::size_t{4096}",
        "communicator/shared_memory/large_pages.cpp", "*",
    ),
    Mutation(
        "ranks-begin-at-pages-of-4-kib", "communicator/shared_memory/process/members.hpp",
        "std::size_t{64} << 10U", "std::size_t{4} << 10U",
        "communicator/shared_memory/large_pages.cpp", "*",
    ),
    Mutation(
        "another-process-file-is-shared", "communicator/detail/shared_mapping.hpp",
        "identity(own_view.number()) != std::array{maker[device], maker[inode]}", "false",
        "communicator/shared_buffer.test.cpp", "a rank that finds another file*",
    ),
    Mutation(
        "files-are-told-by-their-device-alone", "communicator/detail/shared_mapping.hpp",
        "static_cast<std::int64_t>(status.st_ino)", "std::int64_t{0}",
        "communicator/shared_buffer.test.cpp", "a rank that finds another file*",
    ),
    Mutation(
        "wrong-secrets-open-shared-memory", "communicator/shared_handle.hpp",
        "*got == sizeof told && told == secret_", "*got == sizeof told",
        "communicator/shared_handle.test.cpp", "a wrong secret*",
    ),
    Mutation(
        "half-a-secret-opens-shared-memory", "communicator/shared_handle.hpp",
        "told == secret_", "told[0] == secret_[0]",
        "communicator/shared_handle.test.cpp", "a wrong secret*",
    ),
    Mutation(
        "other-users-get-shared-memory", "communicator/shared_handle.hpp",
        "peer_user(client.socket) == ::geteuid()", "true",
        "communicator/shared_handle.test.cpp", "another user*",
    ),
    Mutation(
        "shared-memory-of-other-users-is-opened", "communicator/shared_handle.hpp",
        "user != ::geteuid()", "!user",
        "communicator/shared_handle.test.cpp", "another user*",
    ),
    Mutation(
        "forked-processes-offer-what-they-do-not-serve", "communicator/shared_handle.hpp",
        "if (!offer || !offer->is_here()) {", "if (!offer) {",
        "communicator/shared_handle.test.cpp", "a forked process*",
    ),
    Mutation(
        "handles-of-more-than-there-is-are-opened", "communicator/shared_handle.hpp",
        "if (count() > size / element_bytes) {", "if (false) {",
        "communicator/shared_handle.test.cpp", "a handle of nothing*",
    ),
    Mutation(
        "checks-are-not-compared", "participant/detail/impl/model_checks.ipp",
        'list.add("JOINABLE_CHECK", requested.text);', 'list.add("JOINABLE_CHECK", 0);',
        "participant/requested_checks.test.cpp", "ranks with other words*",
    ),
    Mutation(
        "requested-replicas-override-options", "participant/detail/impl/model_checks.ipp",
        "requested.replicas && has_replicas && options.verify_replicas == 0", "requested.replicas && has_replicas",
        "participant/requested_checks.test.cpp", "with JOINABLE_CHECK=replicas*",
    ),
    Mutation(
        "replicas-are-compared-where-values-differ", "participant/detail/impl/model_checks.ipp",
        "requested.replicas && has_replicas &&", "requested.replicas && (has_replicas || true) &&",
        "participant/requested_checks.test.cpp", "with JOINABLE_CHECK=replicas*",
    ),
    Mutation(
        "unknown-checks-are-ignored", "detail/impl/requested_checks.ipp",
        "if (check == nullptr) {", "if (check == nullptr) { continue;",
        "participant/requested_checks.test.cpp", "JOINABLE_CHECK has words*",
    ),
    Mutation(
        "ranks-compare-only-by-option", "communicator/detail/comparison.hpp",
        "compares = compares || RequestedChecks::read().collectives;", "RequestedChecks::read();",
        "communicator/requested_checks.test.cpp", "*several machines*",
    ),
    Mutation(
        "one-rank-may-compare-alone", "communicator/detail/comparison.hpp",
        "if (!others.empty()) {", "if (others.size() > 8) {",
        "communicator/hierarchical/collectives.test.cpp", "a rank that does not compare*",
    ),
    Mutation(
        "messages-compare-only-by-option", "communicator/algorithms/detail/message_engine.hpp",
        "options.check || RequestedChecks::read().collectives", "(RequestedChecks::read(), options.check)",
        "communicator/requested_checks.test.cpp", "*of messages*",
    ),
    Mutation(
        "shared-values-may-be-copies", "participant/share_parameters.hpp",
        "if (!is_in_place(i)) {", "if (false) {",
        "participant/share_parameters.test.cpp", "values that cannot be moved*",
    ),
    Mutation(
        "shared-values-outlive-their-memory", "participant/share_parameters.hpp",
        "parameters_[i].release_value();", ";",
        "participant/share_parameters.test.cpp", "*",
    ),
    Mutation(
        "all-ranks-give-the-shared-values", "participant/share_parameters.hpp",
        "bool const is_maker = comm.rank() == 0;", "bool const is_maker = comm.rank() == comm.size() - 1;",
        "participant/share_parameters.test.cpp", "the values of all ranks*",
    ),
    Mutation(
        "shared-values-are-row-major", "participant/share_parameters.hpp",
        "detail::dense_strides(value.extents(), value.strides())", "row_major_strides(value.extents())",
        "participant/share_parameters.test.cpp", "the values of all ranks*",
    ),
    Mutation(
        "thread-ranks-share-one-model-twice", "participant/share_parameters.hpp",
        "entry.enter(list, false);", "",
        "participant/share_parameters.test.cpp", "thread ranks do not*",
    ),
    Mutation(
        "shared-device-memory-is-freed-while-open", "participant/share_parameters.hpp",
        "            if (!is_maker) {\n                shared.reset();", "            if (is_maker) {\n                shared.reset();",
        "device/cuda/share_parameters.test.cpp", "what a process cannot*",
    ),
    Mutation(
        "shared-device-values-are-not-waited-for", "participant/share_parameters.hpp",
        "device.download(memory_.end() - 1, &last, 1);", ";",
        "device/cuda/share_parameters.test.cpp", "the copies to shared*",
    ),
    Mutation(
        "processes-share-a-model-over-two-devices", "participant/share_parameters.hpp",
        'compared.add("device", to_text(device.id()));', "",
        "device/cuda/share_parameters.test.cpp", "what a process cannot*",
    ),
    Mutation(
        "thread-ranks-take-handles", "participant/share_parameters.hpp",
        "comm.size() > 1 && entry.is_of_threads()", "false",
        "device/cuda/share_parameters.test.cpp", "thread ranks are told*",
    ),
    Mutation(
        "shared-device-memory-is-opened-on-the-current-device", "device/cuda/shared_handle.hpp",
        "if (on.kind != DeviceKind::cuda) {", "{",
        "device/cuda/share_parameters.test.cpp", "the values of processes*",
    ),
    Mutation(
        "shared-values-are-of-any-device", "participant/share_parameters.hpp",
        "if (value && value.device() != device.id()) {", "if (false) {",
        "device/cuda/share_parameters.test.cpp", "what a process cannot*",
    ),
    Mutation(
        "refused-copies-wait-for-memory-that-ended", "device/cuda/device.hpp",
        "        order(engine_stream_, stream_);",
        "        queue_.swap(running_);\n        order(engine_stream_, stream_);\n        running_.swap(queue_);",
        "device/cuda/share_parameters.test.cpp", "no call of CUDA that fails*",
    ),
    Mutation(
        "copies-wait-for-the-end-of-a-capture", "device/cuda/device.hpp",
        "if (detail::is_capturing(engine_stream_)) {",
        "if (detail::is_capturing(engine_stream_)) {\n            queue_.swap(running_);",
        "device/cuda/share_parameters.test.cpp", "an engine that captures*",
    ),
    Mutation(
        "values-on-the-host-are-sent-to-a-device", "participant/share_parameters.hpp",
        "value.device() == DeviceId{}", "false",
        "device/cuda/share_parameters.test.cpp", "what a process cannot*",
    ),
    Mutation(
        "questions-about-memory-leave-errors", "device/cuda/device.hpp",
        "        detail::CurrentCudaDevice const current{index_};\n        cudaPointerAttributes found{};",
        "        cudaPointerAttributes found{};",
        "device/cuda/device.test.cpp", "a question about memory*",
    ),
    Mutation(
        "a-limit-of-file-sizes-kills", "communicator/detail/shared_mapping.hpp",
        "if (exceeds_file_limit(bytes)) {", "if (false) {",
        "communicator/shared_buffer.test.cpp", "a shared buffer beyond the limit*",
    ),
    Mutation(
        "attach-leaves-a-name-to-others", "communicator/shared_memory/process/named_segment.hpp",
        "missing.empty() ? end : std::chrono::steady_clock::time_point{}", "{}",
        "communicator/shared_memory/named_processes.test.cpp", "attach returns when the name is free*",
    ),
    Mutation(
        "a-limit-of-file-sizes-leaves-the-room", "communicator/shared_memory/process/shared_object.hpp",
        "!exceeds_file_limit(bytes) && map(bytes)", "map(bytes)",
        "communicator/shared_memory/named_processes.test.cpp", "a group that ranks split off has memory*",
    ),
    Mutation(
        "core-dumps-have-the-memory-of-forked-ranks", "communicator/shared_memory/process/impl/process_segment.ipp",
        "madvise(memory_, mapped_.bytes(), MADV_DONTDUMP);", ";",
        "communicator/shared_memory/process.test.cpp", "the memory that ranks share is left out*",
    ),
    Mutation(
        "core-dumps-have-the-memory-of-attached-ranks", "communicator/shared_memory/process/shared_object.hpp",
        "madvise(begin(), bytes, MADV_DONTDUMP);", ";",
        "communicator/shared_memory/named_processes.test.cpp", "the memory that ranks share is left out*",
    ),
    Mutation(
        "layouts-leave-a-threshold-out", "communicator/shared_memory/process/members.hpp",
        "        tuning::crowded_slice_bytes,\n", "",
        "communicator/shared_memory/named_processes.test.cpp", "programs that lay out memory*",
    ),
    Mutation(
        "layouts-are-the-last-number", "communicator/shared_memory/process/members.hpp",
        "            hash.add(number);\n", "            hash = Hash{};\n            hash.add(number);\n",
        "communicator/shared_memory/named_processes.test.cpp", "programs that lay out memory*",
    ),
    Mutation(
        "any-layout-may-attach", "communicator/shared_memory/process/named_segment.hpp",
        "if (heading.layout != Heading::own_layout) {", "if (false) {",
        "communicator/shared_memory/named_processes.test.cpp", "an object that is truncated*",
    ),
    # -- what rank 0 takes from ranks by TCP -----------------------------------------------------------
    Mutation(
        "tcp-takes-any-operation", "communicator/tcp/detail/impl/collectives.ipp",
        "static_cast<std::size_t>(header.op) < reduce_op_count &&", "",
        "communicator/tcp/faults.test.cpp", "a rank that breaks the protocol*",
    ),
    Mutation(
        "what-was-answered-is-due", "communicator/tcp/detail/impl/socket.ipp",
        "(info.tcpi_unacked != 0 && is_sent_since)", "info.tcpi_unacked != 0",
        "communicator/tcp/silence.test.cpp", "a machine whose program does not read*",
    ),
    Mutation(
        "time-between-looks-is-silence", "communicator/tcp/detail/impl/socket.ipp",
        " || now - last.age > *silent_since_) {", ") {",
        "communicator/tcp/silence.test.cpp", "a machine with nothing to acknowledge*",
    ),
    Mutation(
        "rank-0-begins-with-too-few-files", "communicator/tcp/detail/impl/hub.ipp",
        "if (left < needed) {", "if (false) {",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that may not open*",
    ),
    Mutation(
        "rank-0-needs-a-file-for-itself", "communicator/tcp/detail/impl/hub.ipp",
        "check_open_files(static_cast<std::size_t>(job.size) - 1);",
        "check_open_files(static_cast<std::size_t>(job.size));",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that may not open*",
    ),
    Mutation(
        "a-refused-wait-is-no-error", "communicator/detail/impl/socket.ipp",
        "int const error = errno == EINTR ? 0 : errno;", "int const error = 0;",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that the system lets no longer wait*",
    ),
    Mutation(
        "a-hub-goes-on-without-waits", "communicator/tcp/detail/impl/hub.ipp",
        "if (error != 0 && !leaving_) {", "if (false) {",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that the system lets no longer wait*",
    ),
    Mutation(
        "machines-are-never-lost", "communicator/tcp/detail/impl/socket.ipp",
        "return silent_since_ && now - *silent_since_ >= limit_;", "return false;",
        "communicator/tcp/silence.test.cpp", "a machine that acknowledges nothing*",
    ),
    Mutation(
        "probes-without-an-answer-are-not-due", "communicator/tcp/detail/impl/socket.ipp",
        "info.tcpi_probes != 0 || ", "",
        "communicator/tcp/silence.test.cpp", "a machine to which nothing is sent*",
    ),
    Mutation(
        "a-shut-window-is-silence", "communicator/tcp/detail/impl/socket.ipp",
        "set(IPPROTO_TCP, TCP_KEEPCNT, 4);", "set(IPPROTO_TCP, TCP_KEEPCNT, 4);\n"
        "    set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);",
        "communicator/tcp/silence.test.cpp", "no timer of the kernel*",
    ),
    Mutation(
        "hubs-do-not-look-for-lost-machines", "communicator/tcp/detail/impl/hub.ipp",
        "if (is_linked(rank) && one.watch.is_lost(one.socket, Clock::now())) {", "if (false) {",
        "communicator/tcp/silence.test.cpp", "a rank out of reach*",
    ),
    Mutation(
        "ranks-do-not-look-for-a-lost-rank-0", "communicator/tcp/detail/impl/rank.ipp",
        "if ((!goes_on || watch_.is_lost(socket_, Clock::now())) && !over_) {", "if (!goes_on && !over_) {",
        "communicator/tcp/silence.test.cpp", "a rank out of reach*",
    ),
    # -- unused parameters --------------------------------------------------------------------------
    Mutation(
        "graph-takes-what-no-rank-used", "bucket/detail/impl/iteration.ipp",
        "if (graph_ && used_ && used_->is_known() && !used_->is_used(i)) {", "if (false) {",
        "bucket/unused.test.cpp", "a static graph*",
    ),
    # -- collectives within the passes of a model -----------------------------------------------------
    Mutation(
        "joined-ranks-send-zeros-in-products", "participant/detail/replayed.hpp",
        "case ReduceOp::product: return T{Number{1}};", "case ReduceOp::product: return T{};",
        "participant/shadowed.test.cpp", "a joined rank changes no result*",
    ),
    Mutation(
        "joined-ranks-send-zeros-in-maxima", "participant/detail/replayed.hpp",
        "if (op == ReduceOp::sum || op == ReduceOp::bit_or) {",
        "if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bit_or) {",
        "participant/shadowed.test.cpp", "extremes of negative*",
    ),
    Mutation(
        "ranks-do-not-compare-collectives-within-passes", "participant/shadowed.hpp",
        "if (!detail::HashAgreement::is_common(&sum[2], ranks)) {",
        "if (ranks == 0) {",
        "participant/shadowed.test.cpp", "ranks that issue different*",
    ),
    Mutation(
        "joined-ranks-broadcast", "participant/shadowed.hpp",
        "!round->is_active(next.root)", "next.root < 0",
        "participant/shadowed.test.cpp", "a broadcast from a rank*",
    ),
    Mutation(
        "skip-goes-on-beside-collectives-within-passes", "participant/gradient_participant.hpp",
        'model_collectives_.require_pass("skip()");', "",
        "participant/shadowed.test.cpp", "skip() between*",
    ),
    Mutation(
        "collectives-of-strangers-within-passes", "participant/shadowed.hpp",
        "Occupation::session_over(parent)", "nullptr",
        "participant/shadowed.test.cpp", "a communicator that no participant*",
    ),
    Mutation(
        "sharded-gradients-wait-for-ranks-that-follow", "bucket/reducer.hpp",
        "reduces_after_pass_ = after_pass;", "static_cast<void>(after_pass);",
        "participant/shadowed.test.cpp", "such a net trains the same*",
    ),
    Mutation(
        "steps-in-backward-meet-nobody", "participant/sharded/detail/to_owners.hpp",
        "return begin_ != nullptr;", "return false;",
        "participant/shadowed.test.cpp", "such a net trains the same*",
    ),
    Mutation(
        "an-evaluation-has-no-end", "participant/gradient_participant.hpp",
        "passes.end_unsynced(false);", "passes.round_.done();",
        "participant/shadowed.test.cpp", "a net that normalises*",
    ),
    Mutation(
        "unsynced-rounds-are-not-held-open", "participant/gradient_participant.hpp",
        "bool const holds = hooks().gathers_values() || model_collectives_.are_followed();",
        "bool const holds = hooks().gathers_values();",
        "participant/shadowed.test.cpp", "nobody else communicates*",
    ),
    # -- sharded optimizers in a guard ----------------------------------------------------------------
    Mutation(
        "strangers-may-communicate", "join/joinable.hpp",
        "require_unguarded(identity_of(comm), name);", "",
        "participant/guarded_optimizers.test.cpp", "an optimizer that the guard*,what gathers*",
    ),
    Mutation(
        "strangers-are-refused-in-a-part-too", "join/detail/impl/session.ipp",
        "!runs_rounds() || is_shadowing_ || turns_.is_open()", "!runs_rounds()",
        "participant/guarded_optimizers.test.cpp", "what a part of*",
    ),
    Mutation(
        "joined-ranks-hear-no-text-of-a-stranger", "join/detail/impl/session.ipp",
        "recorded([&] { // it is no participant, so nobody else would",
        "[](auto const& f) { f(); }([&] { // it is no participant, so nobody else would",
        "participant/guarded_optimizers.test.cpp", "an optimizer that the guard*",
    ),
    Mutation(
        "two-optimizers-step-one-parameter", "participant/sharded/optimizer.hpp",
        "claims.add_stepped(group.given(), group.first);", "",
        "participant/guarded_optimizers.test.cpp", "two optimizers that step*",
    ),
    Mutation(
        "an-unfrozen-parameter-is-not-averaged", "participant/detail/impl/model_checks.ipp",
        "if (!listed.requires_grad && parameters_[i].requires_grad()) {", "if (false) {",
        "participant/listed_model.test.cpp", "a parameter that is unfrozen*",
    ),
    Mutation(
        "texts-tell-to-call-a-refresh-that-is-private", "interop/torch_sharded.hpp",
        "        this->hide_refresh();\n", "",
        "interop/torch_sharded.test.cpp", "no text tells to call refresh()*",
    ),
    Mutation(
        "texts-tell-to-call-a-refresh-that-refuses-sharded-values", "participant/sharded/optimizer.hpp",
        "return UpdateRule<Rule> && !shards_values();", "return UpdateRule<Rule>;",
        "participant/listed_model.test.cpp", "a model whose values are sharded*",
    ),
    Mutation(
        "texts-tell-to-call-a-refresh-that-does-not-compile", "participant/sharded/optimizer.hpp",
        "return UpdateRule<Rule> && !shards_values();", "return !shards_values();",
        "participant/local_optimizer.test.cpp", "a text does not tell*",
    ),
    Mutation(
        "a-model-may-change-after-it-was-made", "tensor/parameters.hpp",
        "detail::is_like(*value, before.dtype, before.extents, before.device);", "true;",
        "participant/listed_model.test.cpp", "a value with another dtype*",
    ),
    Mutation(
        "other-ranks-hear-of-a-changed-model-in-guards-only", "participant/gradient_participant.hpp",
        "detail::abort_if_throws(comm_, f);", "f();",
        "participant/listed_model.test.cpp", "a parameter that is unfrozen*",
    ),
    Mutation(
        "an-evaluation-compares-what-was-listed", "participant/gradient_participant.hpp",
        "return (announced != nullptr ? announced->phase : notice.phase) == Phase::train;",
        "return notice.phase == Phase::train;",
        "participant/listed_model.test.cpp", "an evaluation and*",
    ),
    Mutation(
        "what-is-frozen-now-is-used", "bucket/detail/impl/iteration.ipp",
        "if (is_frozen_now || (is_recorded &&", "if ((is_recorded &&",
        "participant/listed_model.test.cpp", "with find_unused a parameter*",
    ),
    Mutation(
        "marks-of-what-was-frozen-in-a-window-count", "bucket/detail/impl/iteration.ipp",
        "is_open_ && states_[i] != State::pending && is_frozen(i)", "is_open_ && is_unused(i) && is_frozen(i)",
        "participant/listed_model.test.cpp", "a parameter frozen after rounds*",
    ),
    Mutation(
        "refresh-takes-owners-of-another-number", "participant/sharded/optimizer.hpp",
        "if (!owners.empty() && owners.size() != list.size()) {", "if (false) {",
        "participant/refresh_sharded.test.cpp", "owners that were chosen*",
    ),
    Mutation(
        "refresh-drops-an-open-window", "participant/detail/relisted.hpp",
        "if (!window.window().is_empty() && ", "if (false && ",
        "participant/refresh.test.cpp", "an open window is refused*",
    ),
    Mutation(
        "refresh-sends-no-newly-trained-value", "participant/detail/relisted.hpp",
        "is_alike && is_there && (listed.requires_grad || !now[i].requires_grad());", "is_alike && is_there;",
        "participant/refresh.test.cpp", "values of newly trained*",
    ),
    Mutation(
        "layers-of-one-name-are-one-layer", "participant/detail/relisted.hpp",
        "is_alike && is_there && (", "is_alike && (",
        "participant/refresh.test.cpp", "a layer that replaces one*",
    ),
    Mutation(
        "memory-that-a-value-has-left-names-it", "participant/detail/relisted.hpp",
        "value != nullptr && is_at(value, i)", "value != nullptr",
        "participant/refresh_sharded.test.cpp", "a parameter whose value lies where*",
    ),
    Mutation(
        "what-lies-where-another-value-was-is-not-sent", "participant/detail/relisted.hpp",
        " && before.parameters()[i].value().data() == address;", ";",
        "participant/refresh.test.cpp", "a parameter whose value lies where*",
    ),
    Mutation(
        "refresh-looks-where-values-were-given", "participant/sharded/optimizer.hpp",
        "list_given(given_[k], group.parameters); // they", "; // they",
        "participant/refresh_sharded.test.cpp", "state follows parameters without names*",
    ),
    Mutation(
        "ranks-refresh-from-different-lists", "participant/refresh.hpp",
        "relisted.agree_on(compared, list);", ";",
        "participant/refresh.test.cpp", "ranks that know the same list*",
    ),
    Mutation(
        "a-refused-refresh-leaves-another-model", "participant/refresh.hpp",
        "model.model() = std::move(former);", ";",
        "participant/refresh.test.cpp", "ranks that list different models*",
    ),
    Mutation(
        "refresh-leaves-residuals-where-they-were", "participant/refresh.hpp",
        "return relisted.was(i);", "return std::optional{i};",
        "participant/refreshed_state.test.cpp", "the residuals of a reduction*",
    ),
    Mutation(
        "residuals-of-frozen-parameters-come-back", "bucket/compression/detail/feedback.hpp",
        "keep_parameters(residuals_, parts);", ";",
        "participant/refreshed_state.test.cpp", "the residuals of a reduction*",
    ),
    Mutation(
        "refresh-moves-state-by-index", "participant/sharded/optimizer.hpp",
        "before[k].first + *relisted[k].was(i)", "before[k].first + i",
        "participant/refresh_sharded.test.cpp", "a sharded optimizer whose*",
    ),
    Mutation(
        "a-refused-refresh-loses-shards", "participant/sharded/optimizer.hpp",
        "if (has_begun) {", "if (false) {",
        "participant/refresh_sharded.test.cpp", "a sharded optimizer refuses*",
    ),
    Mutation(
        "a-group-stays-whose-values-were-not-sent", "participant/sharded/optimizer.hpp",
        "        } catch (...) {\n            undo();\n", "        } catch (...) {\n",
        "participant/refresh_sharded.test.cpp", "a group whose values could not be sent*",
    ),
    Mutation(
        "groups-stay-whose-values-could-not-be-moved", "participant/sharded/optimizer.hpp",
        "            leave_values(made);\n            undo();\n", "            leave_values(made);\n",
        "participant/refresh_sharded.test.cpp", "after a refresh that is refused on one rank*",
    ),
    Mutation(
        "a-refused-refresh-keeps-values", "participant/sharded/optimizer.hpp",
        "                        group.values->take(group.shards, scratch_[0]);\n                    }));", "                    }));",
        "participant/refresh_sharded.test.cpp", "after a refresh that is refused on one rank*",
    ),
    Mutation(
        "values-in-their-buckets-are-set-again", "participant/sharded/detail/impl/value_store.ipp",
        "        if (is_moved(i)) {\n            whole_[i].set_value", "        if (parts_[i].value) {\n            whole_[i].set_value",
        "participant/refresh_sharded.test.cpp", "after a refresh that is refused on one rank*",
    ),
    Mutation(
        "masters-are-rounded-by-refresh", "participant/sharded/optimizer.hpp",
        "return !relisted[k].was_trained(i) || !relisted[k].is_equal(i);", "return true;",
        "participant/refresh_sharded.test.cpp", "masters of 16 bits*",
    ),
    Mutation(
        "a-sharded-model-refreshes-within-a-window", "participant/sharded/optimizer.hpp",
        "detail::require_no_window(detail::WindowOf{join_state_}, [&] { return are_cleared(); });", ";",
        "participant/refresh_sharded.test.cpp", "a sharded model refuses*",
    ),
    Mutation(
        "ranks-step-by-other-settings", "participant/sharded/detail/settings.hpp",
        "session_of(state)->note_settings(list_of_used_, hash_of_used_);", "",
        "participant/guarded_optimizers.test.cpp", "settings that ranks have stepped by*",
    ),
    Mutation(
        "settings-of-the-last-step-are-not-compared", "join/detail/impl/session.ipp",
        "rounds_.announce_closing();", "rounds_.announce_nothing();",
        "participant/guarded_optimizers.test.cpp", "settings that ranks have stepped by*",
    ),
    Mutation(
        "a-setting-that-changes-is-listed-once", "participant/sharded/detail/settings.hpp",
        "if (!is_same) {", "if (used_.empty()) {",
        "participant/guarded_optimizers.test.cpp", "settings that ranks have stepped by*",
    ),
    Mutation(
        "thread-ranks-train-one-model", "communicator/shared_memory/group/impl/group_storage.ipp",
        "return i < own && k >= own && memory.rank != other.rank;", "return false;",
        "participant/shared_models.test.cpp", "thread ranks that train one model*",
    ),
    Mutation(
        "all-models-that-ranks-make-are-compared", "communicator/shared_memory/group/impl/group_storage.ipp",
        "other.memory->number == memory.number", "true",
        "participant/shared_models.test.cpp", "only ranks of one group*",
    ),
    Mutation(
        "ranks-of-all-groups-are-compared", "communicator/shared_memory/group/impl/group_storage.ipp",
        "other.group == group &&", "",
        "participant/shared_models.test.cpp", "only ranks of one group*",
    ),
    Mutation(
        "frozen-parameters-are-not-shared", "communicator/model_table.hpp",
        "if (parameters[i].requires_grad()) {", "if (true) {",
        "participant/shared_models.test.cpp", "thread ranks may share frozen*",
    ),
    Mutation(
        "values-are-never-shared", "communicator/model_table.hpp",
        "if (!shares_values) {", "if (true) {",
        "participant/shared_models.test.cpp", "ranks may share values*",
    ),
    Mutation(
        "gradients-may-lie-in-values-of-other-groups", "participant/sharded/detail/plan.hpp",
        "    check_gradients_apart(all);\n", "",
        "participant/zero_redundancy_optimizer.test.cpp", "a gradient that lies in a value*",
    ),
    Mutation(
        "views-of-other-elements-share-all-that-lies-between", "tensor/impl/overlap.ipp",
        "std::size_t const unit = size_a == size_b", "if (size_a != size_b) { return true; }\n    std::size_t const unit = size_a == size_b",
        "tensor/overlap.test.cpp", "interleaved views*",
    ),
    Mutation(
        "broken-measurements-keep-their-reason", "communicator/algorithms/measure_costs.hpp",
        "abort_if_throws(over_, [&] {\n            return over_.send({sent_.data(), count, DType::f32}, peer);\n        });",
        "over_.send({sent_.data(), count, DType::f32}, peer);",
        "communicator/algorithms/measure_costs.test.cpp", "a rank that fails while*",
    ),
    Mutation(
        "an-entry-outlives-its-exchange", "communicator/model_table.hpp",
        "~ModelEntry() { leave(); }", "~ModelEntry() {}",
        "participant/shared_models.test.cpp", "memory counts no longer*",
    ),
    Mutation(
        "two-models-average-one-parameter", "participant/data_parallel.hpp",
        "            claims.add_averaged(parameters);\n", "",
        "participant/guarded_optimizers.test.cpp", "two participants that average*",
    ),
    # -- what a process that a rank has forked may do ------------------------------------------------
    Mutation(
        "a-helper-of-a-process-calls-its-collectives", "communicator/shared_memory/group/board_communicator.hpp",
        "        rank_.require_here(rank_.rank());\n", "",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked*",
    ),
    Mutation(
        "a-helper-changes-the-deadline-of-its-rank", "communicator/shared_memory/process/impl/process_segment.ipp",
        "outcome_ != nullptr && is_here()", "outcome_ != nullptr",
        "communicator/shared_memory/process.test.cpp", "a process that a rank has forked changes no*",
    ),
    Mutation(
        "a-helper-has-arenas-of-its-rank", "communicator/shared_memory/impl/process.ipp",
        "return rank_here().memory().allocate(", "return rank_.memory().allocate(",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked says*",
    ),
    Mutation(
        "a-helper-computes-for-its-rank", "communicator/shared_memory/group/board_communicator.hpp",
        "return {rank_here().group().board(), rank_.rank()};", "return {rank_.group().board(), rank_.rank()};",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked says*",
    ),
    Mutation(
        "a-helper-waits-for-works-of-its-rank", "communicator/detail/work_of.hpp",
        "        rank_->require_here(rank_->rank());\n", "",
        "communicator/shared_memory/named_processes.test.cpp", "a process that a rank has forked*",
    ),
    Mutation(
        "a-rank-that-was-told-takes-the-blame", "detail/impl/failure.ipp",
        "            reason.ranks = culprits->numbers;\n", "",
        "communicator/shared_memory/process.test.cpp", "a rank that throws what it was told*",
    ),
    Mutation(
        "a-helper-returns-from-the-body-for-its-rank", "communicator/shared_memory/impl/run_processes.ipp",
        "end_process(0);", "",
        "communicator/shared_memory/process.test.cpp", "a process that a rank has forked*",
    ),
    Mutation(
        "a-helper-throws-from-the-body-for-its-rank", "communicator/shared_memory/impl/run_processes.ipp",
        "end_process(1);", "",
        "communicator/shared_memory/process.test.cpp", "a process that a rank has forked*",
    ),
    Mutation(
        "an-abort-throws-out-of-destructors", "communicator/detail/work_of.hpp",
        "    } catch (...) { // NOLINT(bugprone-empty-catch): the others notice that it leaves\n    }",
        "    } catch (int) {\n    }",
        "communicator/tcp/faults.test.cpp", "a process that a rank by TCP has forked*",
    ),
    Mutation(
        "rank-0-counts-no-open-files", "communicator/tcp/detail/impl/hub.ipp",
        "left += ::fcntl(file, F_GETFD) == -1 ? 1U : 0U;", "++left;",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that may not open*",
    ),
    Mutation(
        "ranks-that-rank-0-cannot-accept-are-blamed", "communicator/tcp/detail/impl/hub.ipp",
        "is_meeting ? handshakes_->obstacle() : \"\"", "\"\"",
        "communicator/tcp/meeting.test.cpp", "a rank 0 that has no file left*",
    ),
    Mutation(
        "models-are-made-in-guards", "participant/data_parallel.hpp",
        "detail::require_unguarded(", "static_cast<void>(",
        "participant/guarded_optimizers.test.cpp", "a model that one rank makes in a guard*",
    ),
    Mutation(
        "sharded-optimizers-are-made-in-guards", "participant/sharded/optimizer.hpp",
        "        detail::require_unguarded(detail::identity_of(comm_), \"a sharded optimizer that is made\");\n", "",
        "participant/guarded_optimizers.test.cpp", "a model that one rank makes in a guard*",
    ),
    Mutation(
        "carries-with-weights-meet-rounds-without", "join/detail/impl/rounds.ipp",
        "    if (!is_carried || ", "    if (true || ",
        "participant/window.test.cpp", "what joined ranks hold with weights*",
    ),
    Mutation(
        "skips-do-not-tell-of-windows-without-weights", "join/detail/impl/rounds.ipp",
        "lanes.weighted == 0 && !tells_by_window ? 1 : 0;", "lanes.weighted == 0 ? 1 : 0;",
        "participant/window.test.cpp", "a rank that skips while it holds batches*",
    ),
    Mutation(
        "captured-steps-claim-no-averages", "participant/captured/captured_step.hpp",
        "claims.add_averaged(view_of(gradients_[i]), i);", "static_cast<void>(claims);",
        "communicator/nccl/captured_step.test.cpp", "a gradient that a captured step and*",
    ),
    Mutation(
        "sharded-models-claim-no-averages", "participant/sharded/data_parallel.hpp",
        "this->claim(claims, true);", "this->claim(claims, false);",
        "participant/guarded_optimizers.test.cpp", "two participants that average*",
    ),
    Mutation(
        "an-optimizer-that-averages-claims-no-averages", "participant/sharded/zero_redundancy_optimizer.hpp",
        "this->claim(claims, optimizer_options().reduces_gradients);", "this->claim(claims, false);",
        "participant/guarded_optimizers.test.cpp", "two participants that average*",
    ),
    Mutation(
        "only-equal-pointers-are-one-parameter", "tensor/impl/overlap.ipp",
        "std::less<>{}(ranges[b].begin, ranges[a].end)", "ranges[b].begin == ranges[a].begin",
        "participant/guarded_optimizers.test.cpp", "views that overlap*",
    ),
    Mutation(
        "settings-are-not-compared-at-entry", "participant/sharded/optimizer.hpp",
        "detail::agree_on_rule(list, rules_[group]);", "",
        "participant/guarded_optimizers.test.cpp", "settings that were changed*",
    ),
    Mutation(
        "texts-of-turns-name-no-member", "join/detail/entrant.hpp",
        "info.verb = J::join_verb;", "",
        "participant/guarded_optimizers.test.cpp", "what is out of turn*",
    ),
    Mutation(
        "texts-of-turns-give-no-order", "join/detail/impl/turn_order.ipp",
        "name(*expected) + order(announced)", "name(*expected)",
        "participant/guarded_optimizers.test.cpp", "what is out of turn*",
    ),
    Mutation(
        "extents-of-a-gradient-are-not-named", "bucket/impl/gradients.ipp",
        "return to_text(tensor) + (", "return concat(name_of(tensor.dtype())) + (",
        "bucket/reducer.test.cpp", "a model that cannot*",
    ),
    # -- the guard's entry --------------------------------------------------------------------------
    Mutation(
        "sync-every-is-not-compared", "join/detail/impl/entry.ipp",
        'list.add("sync_every", options.sync_every);', "",
        "join/entry.test.cpp", "each option*",
    ),
    Mutation(
        "weight-is-not-compared", "join/detail/impl/entry.ipp",
        'list.add("weight_per_input", options.weight_per_input ? "a value" : "no value");', "",
        "join/entry.test.cpp", "each option*",
    ),
    Mutation(
        "post-order-is-not-compared", "join/detail/impl/entry.ipp",
        'list.add("order of post hooks", post);', "",
        "join/entry.test.cpp", "post hooks*",
    ),
    Mutation(
        "a-timeout-of-0", "join/detail/impl/attachments.ipp",
        "timeout <= 0", "timeout < 0",
        "join/schedule.test.cpp", "a period of 0*",
    ),
    Mutation(
        "names-of-participants-dangle", "join/joinable.hpp",
        "lasting_text<decltype(joinable.join_name())>,", "true,",
        "../fail/participant_with_a_name_by_value.cpp", "*",
    ),
    Mutation(
        "names-of-parameters-dangle", "tensor/parameter.hpp",
        "requires lasting_text<decltype(parameter_traits_of<P>::name(p))>;",
        "requires std::convertible_to<decltype(parameter_traits_of<P>::name(p)), std::string_view>;",
        "../fail/parameter_traits_with_a_name_by_value.cpp", "*",
    ),
    Mutation(
        "copies-of-elements-are-trained", "tensor/parameter.hpp",
        "!owns_elements<std::remove_const_t<P>> && requires(P&& pointer)", "requires(P&& pointer)",
        "../fail/parameter_traits_of_copies.cpp", "*",
    ),
    Mutation(
        "a-number-is-a-parameter-s-tensor", "tensor/parameter.hpp",
        "        !is_number,\n", "        true,\n",
        "../fail/parameter_traits_of_numbers.cpp", "*",
    ),
    Mutation(
        "gradients-may-lie-in-values", "participant/detail/impl/model_checks.ipp",
        "return i < size && k >= size;", "return i < size && k > size + i;",
        "participant/data_parallel.test.cpp", "a parameter listed twice*",
    ),
    Mutation(
        "keywords-change-signs", "hook/keywords.hpp",
        "if (static_cast<From>(held) != value || (held > To{}) != (value > From{})) {",
        "if (static_cast<From>(held) != value) {",
        "hook/keywords.test.cpp", "a whole number*",
    ),
    Mutation(
        "keywords-lose-bits", "hook/keywords.hpp",
        "if (static_cast<From>(held) != value || (held > To{}) != (value > From{})) {",
        "if ((held > To{}) != (value > From{})) {",
        "hook/keywords.test.cpp", "a whole number*",
    ),
    Mutation(
        "optional-keywords-change-signs", "hook/keywords.hpp",
        "check_keyword_value<typename held_by<To>::type>(value);", "",
        "hook/keywords.test.cpp", "an optional number*",
    ),
    Mutation(
        "keywords-become-infinite", "hook/keywords.hpp",
        "if (is_finite && (value > most", "if (false && (value > most",
        "hook/keywords.test.cpp", "a number that becomes infinite*",
    ),
    # -- what is shown of rounds --------------------------------------------------------------------
    Mutation(
        "evaluations-are-passes-of-the-next-round", "trace/impl/data_parallel_report.ipp",
        "if (inner.begin < event.begin) {", "if (false) {",
        "trace/data_parallel_report.test.cpp", "times are averages*",
    ),
    Mutation(
        "shadowed-rounds-are-not-reported", "participant/gradient_participant.hpp",
        "                shadow(round);\n                count_reduction();", "                shadow(round);",
        "trace/data_parallel_report.test.cpp", "a line comes*",
    ),
    Mutation(
        "lines-come-in-every-round", "participant/gradient_participant.hpp",
        "report_ && ++reductions_ % module_->options().report_every == 0", "static_cast<bool>(report_)",
        "trace/data_parallel_report.test.cpp", "a line comes*",
    ),
    Mutation(
        "a-skipped-round-is-reported-later", "participant/gradient_participant.hpp",
        "            round_range_.reset();\n        });\n        report_if_due();",
        "            round_range_.reset();\n        });",
        "trace/data_parallel_report.test.cpp", "a line comes*",
    ),
    Mutation(
        "reports-fail-in-rounds", "participant/gradient_participant.hpp",
        "        count_reduction();\n        if (!steps_) {",
        "        count_reduction();\n        report_if_due();\n        if (!steps_) {",
        "trace/data_parallel_report.test.cpp", "what a sink of lines*",
    ),
    Mutation(
        "no-rounds-are-a-remainder", "participant/data_parallel.hpp",
        "if (options().report_every == 0) {", "if (false) {",
        "trace/data_parallel_report.test.cpp", "a model that never reports*",
    ),
    Mutation(
        "a-divisor-of-no-weights-is-an-old-one", "participant/averaging.hpp",
        "last_divisor = 0;\n                return", "return",
        "trace/data_parallel_report.test.cpp", "the divisor is*",
    ),
    Mutation(
        "local-gradients-have-a-divisor", "participant/data_parallel.hpp",
        "return leaves_gradients_local() ? 0 : averaging_.last_divisor;", "return averaging_.last_divisor;",
        "trace/data_parallel_report.test.cpp", "a model that averages nothing*",
    ),
    Mutation(
        "inputs-are-never-uneven", "participant/gradient_participant.hpp",
        "has_had_guard_ = true;", "",
        "trace/data_parallel_report.test.cpp", "the divisor is*",
    ),
    Mutation(
        "names-break-lines", "agreement/agreement_list.hpp",
        "code < 0x20", "code < 0x00",
        "trace/data_parallel_report.test.cpp", "a report names*",
    ),
    Mutation(
        "names-of-models-are-not-compared", "participant/detail/impl/model_checks.ipp",
        'list.add("model_name", options.model_name);', "",
        "participant/agreement.test.cpp", "*",
    ),
    Mutation(
        "ranges-outlive-stop", "trace/trace_timeline.hpp",
        "timeline_->is_recording_ &&", "",
        "trace/trace.test.cpp", "a range that was open*",
    ),
    Mutation(
        "ranges-outlive-start", "trace/trace_timeline.hpp",
        "timeline_->starts_ == start_", "true",
        "trace/trace.test.cpp", "a range that was open*",
    ),
    Mutation(
        "waits-of-joined-ranks-are-not-shown", "participant/gradient_participant.hpp",
        "detail::PassRanges<Times>::note_wait(passes_.reducer_->timeline(), round);", "",
        "trace/trace.test.cpp", "a wait is shown*",
    ),
    Mutation(
        "waits-are-shown-twice", "bucket/timeline.hpp",
        "if (!std::exchange(is_heard_, true)) {", "is_heard_ = true;\n        {",
        "trace/trace.test.cpp", "a wait in a loop*",
    ),
    Mutation(
        "roll-calls-of-the-loop-are-the-models", "bucket/timeline.hpp",
        "if (!is_answered) {", "static_cast<void>(is_answered);\n        {",
        "trace/trace.test.cpp", "a wait in a loop*",
    ),
    Mutation(
        "inner-events-come-first", "trace/impl/trace.ipp",
        "a.end > b.end", "a.end < b.end",
        "trace/trace.test.cpp", "of events that begin at once*",
    ),
    Mutation(
        "clocks-are-moved-the-wrong-way", "trace/impl/gather.ipp",
        "words_of_all[rank * own.size() + 2] - words_of_all[2]", "words_of_all[rank * own.size() + 2]",
        "trace/trace.test.cpp", "aligned clocks*",
    ),
    Mutation(
        "a-large-trace-is-written-without-a-sign-of-life", "trace/impl/gather.ipp",
        "            renewal.has_passed(piece.size());\n", "",
        "trace/trace.test.cpp", "a rank that writes a large trace*",
    ),
    Mutation(
        "names-that-are-not-utf-8-are-in-pictures", "trace/impl/picture.ipp",
        "as_utf8(samples_)", "samples_",
        "trace/picture.test.cpp", "a curve below the lanes*",
    ),
    Mutation(
        "names-that-are-not-utf-8-are-in-json", "trace/impl/data_parallel_report.ipp",
        "detail::as_utf8(text + \"}\")", "text + \"}\"",
        "trace/data_parallel_report.test.cpp", "a name that is not UTF-8*",
    ),
    Mutation(
        "waits-count-as-training", "trace/impl/picture.ipp",
        "take_from_training(rounds, event);", "",
        "trace/picture.test.cpp",
    ),
    Mutation(
        "a-shorter-line-leaves-its-end", "trace/impl/progress_line.ipp",
        'sink_("\\r" + line + blanks);', 'sink_("\\r" + line);',
        "trace/progress_line.test.cpp", "on a terminal*",
    ),
    Mutation(
        "numbers-follow-the-locale", "detail/text.hpp",
        "std::to_chars(text.data(), text.data() + text.size(), number, format, digits).ptr;",
        "text.data() + std::snprintf(text.data(), text.size(), format == std::chars_format::fixed "
        '? "%.*f" : "%.*g", digits, number);',
        "detail/text.test.cpp", "numbers in texts*",
    ),
    Mutation(
        "pictures-follow-the-locale", "trace/impl/picture.ipp",
        "return number_text(100 * share, std::chars_format::fixed, 1) + \" %\";",
        "char text[32];\n        std::snprintf(text, sizeof text, \"%.1f %%\", 100 * share);\n        return text;",
        "trace/picture.test.cpp", "a picture is the same in every locale*",
    ),
    # -- rounds -------------------------------------------------------------------------------------
    Mutation(
        "texts-of-ranges-are-lost", "join/detail/guard.hpp",
        "return session_.recorded(f);", "return f();",
        "join/guarded_range.test.cpp", "what a range throws*",
    ),
    Mutation(
        "peers-hear-of-what-was-handled-before-a-range-was-read", "join/detail/guard.hpp",
        "        session_.forget_failure();\n", "",
        "join/guarded_range.test.cpp", "what a range throws*",
    ),
    Mutation(
        "waiting-is-not-counted", "join/detail/impl/rounds.ipp",
        "result_.waited += waited_.end - begin;", "",
        "join/guard.test.cpp", "a result says*",
    ),
    Mutation(
        "an-answer-that-is-there-is-waited-for", "join/detail/impl/rounds.ipp",
        "if (roll_call_.test() && ", "if (false && ",
        "trace/trace.test.cpp", "a wait is shown*",
    ),
    Mutation(
        "a-second-message-is-no-wait", "join/detail/impl/rounds.ipp",
        " && !roll_call_.needs_another_message()", "",
        "trace/trace.test.cpp", "a wait is shown*",
    ),
    Mutation(
        "throw-early-does-not-wait", "join/detail/impl/session.ipp",
        "if (options_.end_policy == EndPolicy::throw_early) {", "if (false) {",
        "join/guard.test.cpp", "*throw_early*",
    ),
    Mutation(
        "no-part-with-loop", "join/detail/impl/turn_order.ipp",
        "        require_part(position, *round_);\n", "",
        "join/failure.test.cpp", "a participant that takes no part*",
    ),
    Mutation(
        "no-part-without-loop", "join/detail/impl/turn_order.ipp",
        "        if (round_) {\n            require_part", "        if (false) {\n            require_part",
        "join/failure.test.cpp", "a participant that takes no part*",
    ),
    Mutation(
        "end-hooks-among-post-hooks", "join/detail/guard.hpp",
        "entrants_[place]->run_post_hook(result, is_last_joiner);",
        "entrants_[place]->run_end_hook();\n            entrants_[place]->run_post_hook(result, is_last_joiner);",
        "join/guard.test.cpp", "end hooks*",
    ),
    Mutation(
        "no-end-hooks", "join/detail/guard.hpp",
        "            entrants_[place]->run_end_hook();", "            static_cast<void>(place);",
        "join/guard.test.cpp", "end hooks*",
    ),
    Mutation(
        "loops-read-elements-again", "join/guarded_range.hpp",
        "if constexpr (reads_early && !(LooksAhead && std::is_reference_v<Element>)) {",
        "if constexpr (false && reads_early) {",
        "join/guarded_range.test.cpp", "a loop reads each element*",
    ),
    Mutation(
        "a-round-of-an-earlier-guard-is-waited-for", "join/joinable.hpp",
        "state_->session_ != nullptr && state_->guards_ == guard_;", "state_->session_ != nullptr;",
        "join/failure.test.cpp", "a round cannot be waited for*",
    ),
    Mutation(
        "a-round-is-waited-for-after-its-guard", "join/joinable.hpp",
        "        if (!is_in_guard()) {\n            throw", "        if (false) {\n            throw",
        "join/failure.test.cpp", "a round cannot be waited for*",
    ),
    Mutation(
        "peers-hear-of-what-was-handled-in-an-earlier-round", "join/detail/impl/session.ipp",
        "outcome_.forget(); // a failure before this round was handled", "",
        "join/failure.test.cpp", "peers are told of the failure*",
    ),
    Mutation(
        "peers-hear-of-what-was-handled-before-a-round-that-was-opened-early", "join/detail/impl/session.ipp",
        "outcome_.forget(); // as open() did before", "// as open() did before",
        "join/failure.test.cpp", "with look-ahead peers are told of no failure*",
    ),
    Mutation(
        "peers-hear-of-what-was-handled-in-the-last-round", "join/detail/impl/session.ipp",
        "outcome_.forget(); // a failure in the last round was handled", "",
        "join/failure.test.cpp", "peers are told of the failure*",
    ),
    Mutation(
        "a-text-does-not-replace-what-was-handled", "join/detail/session.hpp",
        "outcome_.fail_with(text);", "outcome_.record(text);",
        "join/failure.test.cpp", "peers are told of the failure*",
    ),
    Mutation(
        "guards-go-on-without-a-participant", "join/joinable.hpp",
        "session_->lose_participant(position_);", "",
        "join/failure.test.cpp", "a participant that is destroyed before its guard*",
    ),
    Mutation(
        "guards-detach-what-is-destroyed", "join/joinable.hpp",
        "*attached_ = nullptr;", "",
        "join/failure.test.cpp", "a guard leaves a participant alone*",
    ),
    Mutation(
        "a-lost-participant-hides-the-exception-in-flight", "join/detail/impl/session.ipp",
        "    if (std::uncaught_exceptions() > 0) {\n", "    if (false) {\n",
        "join/failure.test.cpp", "a participant that is destroyed before its guard*",
    ),
    Mutation(
        "a-failed-guard-leaves-a-round-open", "participant/gradient_participant.hpp",
        "        stage_ = Stage::idle;\n        model_collectives_.reset();\n        reducer_->forget_words();",
        "        model_collectives_.reset();\n        reducer_->forget_words();",
        "participant/without_pass.test.cpp", "a model is in no round*",
    ),
    Mutation(
        "what-was-left-open-goes-on-in-a-guard", "participant/gradient_participant.hpp",
        "stage_ = Stage::idle; // discards what was left open", "",
        "participant/without_pass.test.cpp", "an iteration that was left open*",
    ),
    Mutation(
        "texts-of-actions-are-lost", "join/joinable.hpp",
        "    } catch (...) {\n        record_failure(joinable, {});\n        throw;", "    } catch (...) {\n        throw;",
        "join/failure.test.cpp", "ranks that another communicator names*",
    ),
    Mutation(
        "texts-of-passes-are-lost", "participant/gradient_participant.hpp",
        "            detail::record_failure(*this, {});\n", "",
        "participant/accumulation.test.cpp", "once a bucket is on its way*",
    ),
    Mutation(
        "guards-end-well-without-a-participant", "join/detail/impl/guard.ipp",
        "session_.require_told();", "",
        "participant/without_pass.test.cpp", "a model that is destroyed before its guard*",
    ),
    # -- weights and skipped batches ----------------------------------------------------------------
    Mutation(
        "a-skip-says-it-is-unweighted", "join/detail/impl/rounds.ipp",
        "lanes.silent = notice.skips && lanes.weighted == 0 && !tells_by_window ? 1 : 0;", "lanes.silent = 0;",
        "participant/accumulation.test.cpp", "whether a skipped*,a rank whose first batch*",
    ),
    Mutation(
        "a-skip-keeps-its-weight", "join/detail/rounds.hpp",
        "return is_scheduled() ? notice.weight.value_or(0) : own_weight(notice);",
        "return notice.weight.value_or(0);",
        "join/accumulation.test.cpp",
    ),
    Mutation(
        "what-was-weighted-is-forgotten", "join/detail/impl/rounds.ipp",
        "totals.weighted != 0 || (totals.silent == totals.active && carry_.weighted != 0);", "totals.weighted != 0;",
        "participant/accumulation.test.cpp", "what ranks accumulated with weights*",
    ),
    Mutation(
        "weights-of-0-divide", "participant/averaging.hpp",
        "if (total == 0) {", "if (false) {",
        "participant/data_parallel.test.cpp", "weights that sum to 0*",
    ),
    Mutation(
        "weights-of-0-have-contributors", "join/detail/impl/rounds.ipp",
        "round.contributor_count_ = 0; // the average is zeros", "",
        "participant/data_parallel.test.cpp", "weights that sum to 0*",
    ),
    Mutation(
        "negative-weights-are-huge", "join/detail/verdict.hpp",
        "auto const given = static_cast<std::int64_t>(weight);", "auto const given = weight;",
        "join/failure.test.cpp", "a participant that is missing*",
    ),
    Mutation(
        "peers-hear-of-a-batch-that-was-skipped", "participant/gradient_participant.hpp",
        "detail::forget_failure(*this); // the failure of the batch: peers need not learn of it", "",
        "participant/accumulation.test.cpp", "peers are not told of a batch*",
    ),
    # -- gradients that are summed where they lie ----------------------------------------------------
    Mutation(
        "gradients-of-threads-are-copied", "bucket/impl/gradients.ipp",
        "stays_in_place_ = true;", "stays_in_place_ = false;",
        "bucket/in_place.test.cpp", "*never copied*",
    ),
    Mutation(
        "zeros-in-buckets-could-be-views", "bucket/impl/gradients.ipp",
        "(!stays_in_place_ || is_packed_[i]) &&", "true &&",
        "trace/data_parallel_report.test.cpp", "a report says that gradients could be views*",
    ),
    Mutation(
        "gradients-with-gaps-are-summed-in-place", "bucket/impl/gradients.ipp",
        "gradient.strides() == place.strides() &&",
        "true &&",
        "bucket/in_place.test.cpp", "*gaps*",
    ),
    Mutation(
        "gradients-that-move-are-not-named", "bucket/impl/gradients.ipp",
        "if (in_place_[i] != nullptr && (!gradient || gradient.data() != in_place_[i])) {",
        "if (in_place_[i] != nullptr && !gradient) {",
        "bucket/in_place.test.cpp", "*other memory*",
    ),
    Mutation(
        "gradients-that-share-memory-are-averaged-twice", "bucket/impl/gradients.ipp",
        "if (has_moved_) {", "if (false) {",
        "bucket/in_place.test.cpp", "*share memory*",
    ),
    Mutation(
        "copied-gradients-may-share-memory-with-those-in-place", "bucket/impl/gradients.ipp",
        "if (has_moved_) {", "if (has_moved_ && is_any_in_place) {",
        "bucket/in_place.test.cpp", "a gradient that is copied may not*",
    ),
    Mutation(
        "a-rank-that-handles-a-failed-end-keeps-its-shares", "join/detail/impl/guard.ipp",
        "if (session_.is_over()) {", "if (false) {",
        "bucket/in_place.test.cpp", "a joined rank that handles*",
    ),
    Mutation(
        "averages-of-views-stay-in-fresh-gradients", "bucket/impl/gradients.ipp",
        "void* const out = are_views_ ? views[first].data() : nullptr;", "void* const out = nullptr;",
        "bucket/in_place.test.cpp", "*makes anew*",
    ),
    Mutation(
        "gradients-at-the-place-of-others-are-summed-there", "bucket/impl/gradients.ipp",
        "!is_in_buckets(gradient);", "gradient.data() != place.data();",
        "bucket/in_place.test.cpp", "*not copied before the sum*",
    ),
    Mutation(
        "sums-of-pieces-have-no-place-of-their-own", "communicator/shared_memory/engine/impl/exchange.ipp",
        "bool const is_in_one_place = payload[word] != payload[ArrivalLine::in];", "bool const is_in_one_place = false;",
        "communicator/shared_memory/pieces.test.cpp", "a sum in pieces*",
    ),
    Mutation(
        "reductions-of-users-get-empty-buckets", "bucket/reducer.hpp",
        "std::same_as<Reduction, AllReduce> && detail::has_sum_of_pieces<Comm>;",
        "std::derived_from<Reduction, AllReduce> && detail::has_sum_of_pieces<Comm>;",
        "bucket/in_place.test.cpp", "*derived from AllReduce*",
    ),
    Mutation(
        "a-pass-that-throws-leaves-its-gradients-to-others", "participant/gradient_participant.hpp",
        "reducer_->take_gradients_back([this] { detail::fail_at_once(*this); });", "",
        "bucket/in_place.test.cpp", "*when a pass has thrown*",
    ),
    Mutation(
        "a-guard-that-a-pass-has-ended-ends-silently", "join/detail/impl/guard.ipp",
        "} else if (!unwinding_.has_begun()) {", "} else if (has_lost && !unwinding_.has_begun()) {",
        "bucket/in_place.test.cpp", "*a guard that a pass has ended*",
    ),
    Mutation(
        "guards-end-without-the-shares-that-others-need", "bucket/reducer.hpp",
        "take_gradients_back([] {}, detail::sums_pieces(comm_));", "take_gradients_back([] {});",
        "bucket/in_place.test.cpp", "*waiting for a share*",
    ),
    Mutation(
        "gradients-get-memory-that-another-one-had", "bucket/impl/gradients.ipp",
        "packed_[i] = is_packed_[i] ? packed_[i] : nullptr;", "",
        "bucket/in_place.test.cpp", "*share memory*",
    ),
    Mutation(
        "pieces-end-where-this-rank-ends-its-own", "communicator/shared_memory/engine/impl/exchange.ipp",
        "end = (std::min)(end, pieces.at(begin * element).end / element);",
        "return (std::min)(end, pieces.at(begin * element).end / element);",
        "communicator/shared_memory/pieces.test.cpp", "*however each rank*",
    ),
    Mutation(
        "other-processes-get-a-list-on-the-heap", "communicator/shared_memory/engine/impl/lent_memory.ipp",
        "{copies, has_out ? pieces.out : copies, 0, pieces.number}};",
        "{pieces.list, has_out ? pieces.out : copies, 0, pieces.number}};",
        "communicator/shared_memory/pieces.test.cpp", "*however each rank*",
    ),
    Mutation(
        "arenas-of-pieces-are-given-out-again", "communicator/shared_memory/engine/impl/lent_memory.ipp",
        "room_->keep_arena(board.place_at(pieces[k].at));", "",
        "communicator/shared_memory/engine/arena.test.cpp", "*in which pieces lie*",
    ),
    Mutation(
        "slices-are-of-the-first-piece", "communicator/shared_memory/engine/slices.hpp",
        "is_in_pieces ? -1 : rank,", "rank,",
        "communicator/shared_memory/pieces.test.cpp", "*whose buffer lies on its heap*",
    ),
    Mutation(
        "pieces-out-of-reach-are-not-copied", "communicator/shared_memory/engine/impl/lent_memory.ipp",
        "copy(loan.copies + first % loan.bytes, part, last - first);", "",
        "communicator/shared_memory/pieces.test.cpp", "*do not reach*",
    ),
    Mutation(
        "sums-do-not-come-back-to-pieces", "communicator/shared_memory/engine/impl/lent_memory.ipp",
        "copy(part, from + first % loan.bytes, last - first);", "",
        "communicator/shared_memory/pieces.test.cpp", "*do not reach*",
    ),
    Mutation(
        "own-pieces-end-nowhere", "communicator/shared_memory/engine/impl/exchange.ipp",
        "rank == own_.rank ? own_.pieces : pieces_of(rank);", "pieces_of(rank);",
        "communicator/shared_memory/pieces.test.cpp", "*do not reach*",
    ),
    Mutation(
        "buckets-leave-before-a-gradient-is-ready", "bucket/reducer.hpp",
        "while (turns().proceed()) { // no bucket starts before a gradient is ready\n        }", "advance();",
        "participant/without_pass.test.cpp", "skip() may follow a pass*",
    ),
    Mutation(
        "a-full-first-bucket-can-be-taken-back", "bucket/reducer.hpp",
        "if (is_map_posted_ && iteration_.is_marked()) {", "if (false) {",
        "participant/without_pass.test.cpp", "skip() is too late*",
    ),
    Mutation(
        "a-first-bucket-without-marks-is-on-its-way", "bucket/reducer.hpp",
        "if (is_map_posted_ && iteration_.is_marked()) {", "if (is_map_posted_) {",
        "participant/without_pass.test.cpp", "skip() may follow a pass*",
    ),
    Mutation(
        "a-handled-failure-hides-the-next-in-its-round", "join/detail/impl/session.ipp",
        "        outcome_.forget_exception(); // of an earlier part: it was handled\n", "",
        "join/failure.test.cpp", "*one handled in the same round*",
    ),
    Mutation(
        "a-chosen-text-ends-with-its-part", "join/detail/guard_outcome.hpp",
        "        if (!is_chosen_) {\n", "        if (true) {\n",
        "join/failure.test.cpp", "a text that fail() was given*",
    ),
    Mutation(
        "a-chosen-text-ends-with-a-skipped-batch", "join/detail/session.hpp",
        "void forget_failure() noexcept { outcome_.forget_exception(); }",
        "void forget_failure() noexcept { outcome_.forget(); }",
        "participant/accumulation.test.cpp", "a text that fail() was given before skip()*",
    ),
    Mutation(
        "buffer-hooks-are-not-compared", "participant/detail/module_state.hpp",
        "        if (hook_) {\n            list.add(", "        if (false) {\n            list.add(",
        "participant/module_state.test.cpp", "a buffer hook that some ranks have*",
    ),
    Mutation(
        "a-sharded-model-that-fails-takes-its-values", "participant/sharded/data_parallel.hpp",
        "            Optimizer::leave_values(this->groups());\n", "",
        "participant/bucket_values.test.cpp", "values that moved stay*",
    ),
    Mutation(
        "skips-drop-what-was-accumulated", "participant/gradient_participant.hpp",
        "has_accumulated_ && round.contributes();", "false;",
        "participant/accumulation.test.cpp", "what was accumulated before a skipped batch*",
    ),
    Mutation(
        "untouched-gradients-are-sent-no-more", "participant/gradient_participant.hpp",
        "if (!round.is_shadow() || !leaves_joined_untouched()) {", "if (true) {",
        "participant/window.test.cpp", "a joined rank that leaves its gradients untouched*",
    ),
    # -- gradients of joined ranks ------------------------------------------------------------------
    Mutation(
        "joined-gradients-are-kept", "bucket/impl/gradients.ipp",
        "if (is_of_others_[i] && joined_ == JoinedGradients::zeroed_at_end) {", "if (false) {",
        "participant/joined_gradients.test.cpp", "a rank that joined begins*",
    ),
    Mutation(
        "untouched-beside-a-step", "participant/data_parallel.hpp",
        "== JoinedGradients::untouched && why != nullptr) {",
        "== JoinedGradients::untouched && false) {",
        "participant/joined_gradients.test.cpp", "untouched*",
    ),
    Mutation(
        "late-gradients-are-sent", "participant/detail/impl/ready_check.ipp",
        "if (now != mark.hash && !is_gone) {", "if (false) {",
        "participant/verify_ready.test.cpp",
    ),
    Mutation(
        "shards-are-not-checked", "participant/sharded/data_parallel.hpp",
        "if (this->module_->options().verify_ready) {", "if (false) {",
        "participant/verify_ready.test.cpp", "*sharded model*",
    ),
    Mutation(
        "earlier-marks-are-checked", "participant/detail/impl/ready_check.ipp",
        "is_checked[mark.i] = true;", "",
        "participant/verify_ready.test.cpp",
    ),
    Mutation(
        "joined-ranks-do-not-step", "participant/step.hpp",
        "if (session == nullptr || session->steps_joined_ranks()) {", "if (false) {",
        "participant/process_training.test.cpp", "process ranks with uneven*",
    ),
    # -- transports ---------------------------------------------------------------------------------
    Mutation(
        "roll-calls-have-no-name", "communicator/detail/reasons.hpp",
        "    if (agrees) {\n", "    if (false) {\n",
        "communicator/shared_memory/thread.test.cpp", "a collective beside a guard*",
    ),
    Mutation(
        "communicators-seem-movable", "communicator/shared_memory/group/board_communicator.hpp",
        "        requires std::constructible_from<Rank, Arguments...>\n", "",
        "communicator/shared_memory/split.test.cpp", "a communicator cannot be moved*",
    ),
    Mutation(
        "others-are-not-told-of-a-death", "communicator/shared_memory/process/impl/child_processes.ipp",
        "unburied_.push_back(rank);", "",
        "participant/process_training.test.cpp", "a rank that is killed*",
    ),
    Mutation(
        "a-death-that-is-half-recorded-stays-so", "communicator/shared_memory/board/impl/board.ipp",
        "        has_lost_.store(true);\n        state_of(rank).is_dead.store(true);",
        "        state_of(rank).is_dead.store(true);\n        has_lost_.store(true);",
        "communicator/shared_memory/board/board.test.cpp", "a rank that is killed while it records*",
    ),
    Mutation(
        "test-without-deadline", "communicator/shared_memory/engine/impl/endpoint.ipp",
        "return has_polled_too_long([&] { return board_.missing(sequence); }, \"arrive\") &&", "return false &&",
        "communicator/shared_memory/polling.test.cpp", "a loop of tests beside a rank*",
    ),
    Mutation(
        "slices-are-tested-for-ever", "communicator/shared_memory/engine/impl/endpoint.ipp",
        "return has_polled_too_long([&] { return holding_up_slices(sequence); }, \"copy a slice\") &&", "return false &&",
        "communicator/shared_memory/engine/slices.test.cpp", "a rank that does not come for its slices*",
    ),
    Mutation(
        "overdue-ranks-of-other-groups-count", "communicator/shared_memory/engine/impl/slices.ipp",
        "        return board.is_overdue(rank);\n", "        return std::ranges::count(board.reason().ranks, rank) != 0;\n",
        "communicator/shared_memory/engine/slices.test.cpp", "*in the numbers of another group*",
    ),
    Mutation(
        "a-rank-holds-up-its-own-slices", "communicator/shared_memory/engine/impl/slices.ipp",
        "return rank != own && (", "return own >= 0 && (",
        "communicator/shared_memory/engine/slices.test.cpp", "no rank names itself*",
    ),
    Mutation(
        "a-rank-waits-for-what-it-has-completed", "communicator/shared_memory/engine/impl/endpoint.ipp",
        "Arrival::waiting || is_done(sequence); },", "Arrival::waiting; },",
        "communicator/shared_memory/engine/endpoint.test.cpp", "*reuse its lines",
    ),
    Mutation(
        "each-sum-in-slices-has-a-deadline-of-its-own", "communicator/shared_memory/engine/impl/endpoint.ipp",
        "    is_patience_over_ = true;\n", "",
        "communicator/shared_memory/engine/slices.test.cpp", "*waits one deadline for all",
    ),
    Mutation(
        "chunks-are-tested-for-ever", "communicator/shared_memory/engine/impl/endpoint.ipp",
        "    give_up_on_computing(sequence);\n    return progress(sequence);\n", "    return false;\n",
        "communicator/shared_memory/process.test.cpp", "a rank that is stopped within a collective*",
    ),
    Mutation(
        "a-copy-is-tested-for-ever", "communicator/shared_memory/group/impl/group_rank.ipp",
        "    if (message.polled.reaches(this->deadline())) {\n", "    if (false) {\n",
        "communicator/shared_memory/group/process_group.test.cpp", "a rank that is stopped while it copies*",
    ),
    Mutation(
        "a-gap-between-tests-counts-in-full", "communicator/detail/deadline.hpp",
        "std::chrono::milliseconds{10};", "std::chrono::milliseconds{10'000};",
        "communicator/shared_memory/polling.test.cpp", "a rank that tests now and then*",
    ),
    Mutation(
        "a-wait-that-was-extended-ends-at-once", "communicator/detail/deadline.hpp",
        "                extend(deadline, *left);\n", "",
        "communicator/deadline.test.cpp", "a wait that blocks ends*",
    ),
    Mutation(
        "a-rank-that-never-reports-is-at-work", "communicator/detail/deadline.hpp",
        "reported_at != std::chrono::steady_clock::time_point{} && silence", "silence",
        "communicator/deadline.test.cpp", "a rank is at work*",
    ),
    Mutation(
        "tests-count-for-a-later-wait", "communicator/tcp/detail/impl/rank.ipp",
        "        overdue->clock = {}; // not the time of earlier tests\n", "",
        "communicator/tcp/faults.test.cpp", "a wait after tests*",
    ),
    Mutation(
        "tables-and-equal-parts-look-the-same", "communicator/detail/descriptor.hpp",
        "word() | (has_counts ? by_counts : 0)", "word()",
        "communicator/request.test.cpp", "ranks compare signatures*",
    ),
    Mutation(
        "tables-of-the-caller-are-not-kept", "communicator/detail/request.hpp",
        "            *sizes = PartSizes::of({table, ranks});\n", "",
        "communicator/request.test.cpp", "ranks compare tables*",
    ),
    Mutation(
        "a-test-of-a-message-moves-no-slices", "communicator/shared_memory/group/impl/group_rank.ipp",
        "        this->advance_others();\n", "",
        "communicator/shared_memory/polling.test.cpp", "a loop of tests of a message moves*",
    ),
    Mutation(
        "a-message-is-tested-for-ever", "communicator/shared_memory/group/impl/group_rank.ipp",
        "return has_polled_too_long() && progress(message);", "return false;",
        "communicator/shared_memory/polling.test.cpp", "a loop of tests of a message ends*",
    ),
    Mutation(
        "results-nobody-asked-for", "communicator/tcp/detail/impl/rank.ipp",
        "has_started_ && !pending_.empty() && header.sequence == finished_,",
        "has_started_ && !pending_.empty(),",
        "communicator/tcp/faults.test.cpp", "a rank 0 that breaks*",
    ),
    Mutation(
        "results-of-any-size", "communicator/tcp/detail/impl/rank.ipp",
        "require_bytes(bytes_of_result(), bytes_of_result());", "require_bytes(0, bytes_of_result());",
        "communicator/tcp/faults.test.cpp", "a rank 0 that breaks*",
    ),
    Mutation(
        "frames-lose-who-has-left", "communicator/detail/impl/reasons.ipp",
        "{}, {}, -1, bytes[1] == std::byte{1}}", "{}, {}, -1, false}",
        "communicator/tcp/faults.test.cpp", "a packed reason*",
    ),
    Mutation(
        "stored-reasons-lose-their-origin", "communicator/detail/impl/reasons.ipp",
        "    reason.origin = origin;\n", "",
        "communicator/shared_memory/board/board.test.cpp", "a stored reason*",
    ),
    Mutation(
        "exceptions-name-ranks-of-others", "error.hpp",
        "return reason.origin < 0 ? reason.ranks : std::vector<int>{};", "return reason.ranks;",
        "communicator/shared_memory/board/board.test.cpp", "an exception names no*",
    ),
    Mutation(
        "failures-of-groups-are-not-found", "communicator/shared_memory/group/impl/group.ipp",
        "return reason.origin < 0 && is_same_failure(reason, told);", "return false;",
        "communicator/shared_memory/split.test.cpp", "a rank that leaves a group*",
    ),
    Mutation(
        "ranks-that-wait-do-not-say-where", "communicator/detail/reasons.hpp",
        "if (reason.has_left && !what.empty()", "if (false && !what.empty()",
        "communicator/shared_memory/thread.test.cpp", "a rank that leaves is named with*",
    ),
    Mutation(
        "a-later-reason-wins", "communicator/self.hpp",
        "        if (!reason_) {\n            reason_ = std::move(reason);", "        {\n            reason_ = std::move(reason);",
        "communicator/abort_reason.test.cpp", "a single rank*",
    ),
    Mutation(
        "a-rank-by-tcp-has-a-patience-of-its-own", "communicator/tcp/impl/communicator.ipp",
        "    limits.patience = options.patience;\n", "",
        "communicator/tcp/faults.test.cpp", "a rank that is stopped is TimedOut*",
    ),
    Mutation(
        "a-rank-by-tcp-tells-only-what-it-read-before", "communicator/tcp/detail/rank.hpp",
        "        poll();\n        return over_ ? std::optional{reason()} : std::nullopt;", "        return own_reason_;",
        "communicator/tcp/faults.test.cpp", "each rank over TCP tells*",
    ),
    Mutation(
        "a-frame-without-memory-is-sent-in-part", "communicator/tcp/detail/impl/frame.ipp",
        "if (most > waiting_.capacity()) {", "if (false) {",
        "../trace/allocations.test.cpp", "a collective by TCP for which a rank has no memory*",
    ),
    Mutation(
        "a-collective-without-memory-is-pending", "communicator/tcp/detail/impl/rank.ipp",
        "        pending_.pop_back();\n", "",
        "../trace/allocations.test.cpp", "a collective by TCP for which a rank has no memory*",
    ),
    Mutation(
        "a-header-takes-its-memory", "communicator/tcp/detail/impl/frame.ipp",
        "body.resize((std::min)(bytes, (std::max)(least, 2 * done)));",
        "body.resize((std::max)(bytes, least));",
        "communicator/tcp/faults.test.cpp", "headers that announce*",
    ),
    Mutation(
        "copies-are-used-while-a-late-rank-may-write", "communicator/shared_memory/engine/impl/lent_memory.ipp",
        "loan.is_kept = true;", "",
        "communicator/shared_memory/engine/slices.test.cpp", "a rank that goes on after*",
    ),
    Mutation(
        "arenas-are-used-while-a-late-rank-may-write", "communicator/shared_memory/engine/impl/lent_memory.ipp",
        "room_->keep_arena(loan.at.out);", "",
        "communicator/shared_memory/engine/slices.test.cpp", "a rank that goes on after*",
    ),
    Mutation(
        "arenas-are-used-while-a-late-message-comes", "communicator/shared_memory/group/impl/group_rank.ipp",
        "    if (!message.is_send) {\n        storage_", "    if (false) {\n        storage_",
        "communicator/shared_memory/engine/slices.test.cpp", "a rank that goes on after*",
    ),
    Mutation(
        "arenas-at-one-place-of-a-page", "device/arena.hpp",
        "return static_cast<std::size_t>(rank * apart % lines) * 64;",
        "return static_cast<std::size_t>(rank * apart % lines) * 0;",
        "communicator/shared_memory/engine/arena.test.cpp", "arenas of ranks begin*",
    ),
    Mutation(
        "yields-end-by-count-alone", "communicator/shared_memory/board/waiting.hpp",
        "if (std::chrono::steady_clock::now() - start >= longest_yielding)", "if (false)",
        "communicator/shared_memory/board/waiting.test.cpp", "a wait looks for deaths soon*",
    ),
    Mutation(
        "arenas-close-together", "device/arena.hpp",
        "int const apart = size < lines ? lines / size : 1;", "int const apart = size < lines ? 1 : 1;",
        "communicator/shared_memory/engine/arena.test.cpp", "arenas of ranks begin*",
    ),
    Mutation(
        "the-remedy-is-told-if-rank-0-is-in-a-guard", "communicator/detail/reasons.hpp",
        "            agrees = agrees || other.is_agreement();\n", "",
        "communicator/shared_memory/thread.test.cpp", "a guard that only one rank enters*",
    ),
    Mutation(
        "counts-of-any-number-of-bytes", "communicator/detail/impl/checks.ipp",
        "if (buffer.count > static_cast<std::size_t>(PTRDIFF_MAX) / size_of(buffer.dtype)) {", "if (false) {",
        "communicator/request.test.cpp", "a count whose bytes*",
    ),
    Mutation(
        "products-of-counts-wrap-around", "communicator/detail/impl/checks.ipp",
        "whole.count / ranks != part.count", "whole.count != ranks * part.count",
        "communicator/request.test.cpp", "a count whose bytes*",
    ),
    Mutation(
        "sums-of-counts-wrap-around", "communicator/detail/impl/checks.ipp",
        "if (count > left) {", "if (false) {",
        "communicator/shared_memory/engine/exchange.test.cpp", "counts that do not fit*",
    ),
    Mutation(
        "a-negative-deadline-ends-before-now", "communicator/detail/deadline.hpp",
        "std::clamp(deadline, std::chrono::nanoseconds{0}, year)", "(std::min)(deadline, year)",
        "communicator/deadline.test.cpp", "a wait ends between now*",
    ),
    Mutation(
        "a-wait-that-is-extended-overflows", "communicator/detail/deadline.hpp",
        "waited_ = (std::max)(deadline, none) - (std::max)(left, none);", "waited_ = deadline - left;",
        "communicator/deadline.test.cpp", "a wait that is asked*",
    ),
    Mutation(
        "a-nap-overflows", "communicator/detail/deadline.hpp",
        "(std::max)(deadline, waited_) - (std::max)(waited_, none)", "deadline - waited_",
        "communicator/deadline.test.cpp", "a wait that is asked*",
    ),
    Mutation(
        "groups-over-gloo-hear-nothing-while-they-wait", "communicator/gloo/detail/rank.hpp",
        "        if (parent != nullptr) {\n"
        "            rendezvous.hear", "        if (false) {\n"
        "            rendezvous.hear",
        "communicator/gloo/failure.test.cpp", "an abort of ranks over Gloo ends every wait*",
    ),
    Mutation(
        "ranks-over-gloo-meet-by-the-deadline", "communicator/gloo/detail/rank.hpp",
        "control_.set_deadline(options_.connect_timeout);", "",
        "communicator/gloo/meeting.test.cpp", "all of the construction over Gloo*",
    ),
    Mutation(
        "the-deadline-over-gloo-stays-that-of-construction", "communicator/gloo/detail/rank.hpp",
        "control_.set_deadline(options_.deadline);", "",
        "communicator/gloo/meeting.test.cpp", "all of the construction over Gloo*",
    ),
    Mutation(
        "groups-over-gloo-wait-for-a-hub-that-cannot-run", "communicator/gloo/detail/rank.hpp",
        "if (parent == nullptr || rendezvous.options.rank != 0) {", "if (true) {",
        "communicator/gloo/failure.test.cpp", "a rank over Gloo where no group can meet*",
    ),
    Mutation(
        "ranks-that-gloo-connects-hear-nothing", "communicator/gloo/detail/rank.hpp",
        "if (abort_reason()) {", "if (false) {",
        "communicator/gloo/meeting.test.cpp", "a process that is killed before Gloo connects it*",
    ),
    Mutation(
        "a-rank-that-cannot-connect-by-gloo-says-nothing", "communicator/gloo/detail/rank.hpp",
        "        } catch (CommunicationError const& error) { // there is no thread to connect, or to work\n"
        "            fail({FailureKind::communication, {}, blame(error.what())});\n", "",
        "communicator/gloo/failure.test.cpp", "*cannot start a thread to connect*",
    ),
    Mutation(
        "gloo-waits-five-times-as-long", "communicator/gloo/detail/mesh.hpp",
        "wait_at_most(timeout, has_ended, look)", "wait_at_most(timeout * 100, has_ended, look)",
        "communicator/gloo/meeting.test.cpp", "all of the construction over Gloo*",
    ),
    Mutation(
        "ranks-that-attach-hear-nothing", "communicator/tcp/impl/communicator.ipp",
        "around.hear ? around.hear() : std::nullopt", "std::optional<AbortReason>{}",
        "communicator/gloo/failure.test.cpp", "an abort of ranks over Gloo ends every wait*",
    ),
    Mutation(
        "a-file-of-an-earlier-job-is-read-once", "communicator/gloo/detail/rendezvous.hpp",
        "if (!is_elsewhere) {", "if (true) {",
        "communicator/gloo/meeting.test.cpp", "a file that an earlier job left*",
    ),
    Mutation(
        "the-file-of-ranks-is-not-replaced", "communicator/gloo/detail/rendezvous.hpp",
        "::rename(unfinished.c_str()", "::link(unfinished.c_str()",
        "communicator/gloo/meeting.test.cpp", "ranks meet by a file*",
    ),
    Mutation(
        "the-file-of-ranks-is-for-all-users", "communicator/gloo/detail/rendezvous.hpp",
        "as_new, S_IRUSR | S_IWUSR)", "as_new, 0644)",
        "communicator/gloo/meeting.test.cpp", "the file by which ranks meet can be read*",
    ),
    Mutation(
        "rank-0-writes-where-a-link-leads", "communicator/gloo/detail/rendezvous.hpp",
        "concat(path_, \".\", new_secret());\n"
        "        constexpr int as_new = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW |", "concat(path_, \".unfinished\");\n"
        "        constexpr int as_new = O_WRONLY | O_CREAT |",
        "communicator/gloo/meeting.test.cpp", "a file of all users*",
    ),
    Mutation(
        "the-name-of-an-unfinished-file-is-known", "communicator/gloo/detail/rendezvous.hpp",
        "concat(path_, \".\", new_secret())", "concat(path_, \".unfinished\")",
        "communicator/gloo/meeting.test.cpp", "a file of all users*",
    ),
    Mutation(
        "ranks-read-where-a-link-leads", "communicator/gloo/detail/rendezvous.hpp",
        "O_RDONLY | O_NOFOLLOW |", "O_RDONLY |",
        "communicator/gloo/meeting.test.cpp", "a file of all users*",
    ),
    Mutation(
        "ranks-read-a-file-that-others-may-read", "communicator/gloo/detail/rendezvous.hpp",
        "(status.st_mode & (S_IRWXG | S_IRWXO)) != 0", "false",
        "communicator/gloo/meeting.test.cpp", "a file of all users*",
    ),
    Mutation(
        "ranks-read-the-file-of-another-user", "communicator/gloo/detail/rendezvous.hpp",
        "status.st_uid != ::geteuid() || ", "",
        "communicator/gloo/meeting.test.cpp", "a file of all users*",
    ),
    Mutation(
        "ranks-behind-any-transport-share-models", "communicator/any/communicator.hpp",
        "return communicator().model_table();", "return nullptr;",
        "participant/shared_models.test.cpp", "thread ranks behind*",
    ),
    Mutation(
        "srun-starts-mpich-on-one-machine", "communicator/environment.hpp",
        "for (Launcher const& outer : launchers) { // srun", "for (Launcher const& outer : {launcher}) { // srun",
        "communicator/environment.test.cpp", "ranks on several machines*",
    ),
    Mutation(
        "restarts-of-one-agent-name-the-job-of-all", "communicator/environment.hpp",
        "found.spread.empty() ? launcher.restarts : \"\"", "launcher.restarts",
        "communicator/environment.test.cpp", "ranks whose agents count restarts*",
    ),
    Mutation(
        "ranks-meet-at-the-store-of-torchrun", "communicator/tcp/options.hpp",
        "text(\"JOINABLE_PORT\").empty() && text(\"TORCHELASTIC_USE_AGENT_STORE\") == \"True\"", "false",
        "communicator/tcp/meeting.test.cpp", "ranks do not meet at the port*",
    ),
    Mutation(
        "a-gpu-alone-splits-off-a-host", "communicator/any/communicator.hpp",
        "(reduces_host_memory<Comm> && communicator().size() == 1)", "communicator().size() == 1",
        "communicator/any/communicator.test.cpp", "a group of one rank that moves memory*",
    ),
    Mutation(
        "an-aborted-rank-alone-splits", "communicator/any/communicator.hpp",
        "if (auto const reason = this->abort_reason()) { // a later", "if (auto const reason = std::optional<AbortReason>{}) { // a later",
        "communicator/any/communicator.test.cpp", "an aborted rank that is alone*",
    ),
    Mutation(
        "groups-by-tcp-that-ended-miss-ranks", "communicator/tcp/detail/impl/rank.ipp",
        "if (pending_.empty() || over_) {\n        return {};",
        "if (pending_.empty() || over_) {\n        return pending_.empty() ? std::vector<int>{} : missing_;",
        "communicator/tcp/faults.test.cpp", "no rank is missing*",
    ),
    Mutation(
        "an-abort-waits-once-on-a-slow-connection", "communicator/tcp/detail/rank.hpp",
        "return outbox_.sent() - socket_.undelivered() + inbox_.consumed();", "return inbox_.consumed();",
        "communicator/tcp/faults.test.cpp", "an abort waits as long*",
    ),
    Mutation(
        "bytes-that-come-are-no-sign-of-the-hub", "communicator/tcp/detail/rank.hpp",
        "return outbox_.sent() - socket_.undelivered() + inbox_.consumed();",
        "return outbox_.sent() - socket_.undelivered();",
        "communicator/tcp/faults.test.cpp", "a rank that aborts or asks waits*",
    ),
    Mutation(
        "what-waits-in-the-kernel-of-a-rank-counts-as-moved", "communicator/tcp/detail/rank.hpp",
        "return outbox_.sent() - socket_.undelivered() + inbox_.consumed();",
        "return outbox_.sent() + inbox_.consumed();",
        "communicator/tcp/faults.test.cpp", "an abort waits as long*",
    ),
    Mutation(
        "a-rank-without-files-says-that-rank-0-does-not-listen", "communicator/tcp/detail/impl/address.ipp",
        "if (!socket.is_open() && errno == EMFILE) {", "if (false) {",
        "communicator/tcp/meeting.test.cpp", "a rank that has no file left*",
    ),
    Mutation(
        "a-rank-without-files-looks-for-a-name", "communicator/tcp/detail/impl/address.ipp",
        "            static_cast<void>(open(any));\n", "",
        "communicator/tcp/meeting.test.cpp", "a rank that has no file left*",
    ),
    Mutation(
        "results-that-move-are-dropped", "communicator/tcp/detail/impl/hub.ipp",
        "if (std::exchange(delivered_, delivered) != delivered) {", "if (false) {",
        "communicator/tcp/faults.test.cpp", "what was complete when rank 0 left is still sent*",
    ),
    Mutation(
        "questions-after-the-end-keep-rank-0", "communicator/tcp/detail/impl/hub.ipp",
        "if (!end_) { // which answers it", "if (true) {",
        "communicator/tcp/faults.test.cpp", "a rank that goes on asking and reads nothing*",
    ),
    Mutation(
        "what-waits-in-the-kernel-counts-as-delivered", "communicator/tcp/detail/impl/hub.ipp",
        "delivered += one.outbox.sent() - left;", "delivered += one.outbox.sent();",
        "communicator/tcp/faults.test.cpp", "what was complete when rank 0 left is still sent*",
    ),
    Mutation(
        "a-rank-without-memory-does-not-wait-where-it-leaves", "communicator/tcp/detail/impl/rank.ipp",
        "std::array<std::byte, 4096> ignored{};", "std::vector<std::byte> ignored(4096);",
        "../trace/allocations.test.cpp", "a rank by TCP that leaves takes no memory*",
    ),
    Mutation(
        "a-rank-that-leaves-late-reads-one-piece", "communicator/tcp/detail/impl/rank.ipp",
        "int more = 1000;", "int more = 0;",
        "communicator/tcp/faults.test.cpp", "a rank by TCP that leaves late*",
    ),
    Mutation(
        "an-outbox-has-no-room-at-first", "communicator/tcp/detail/frame.hpp",
        "waiting_.reserve(sizeof(FrameHeader));", "",
        "../trace/allocations.test.cpp", "a rank by TCP that leaves takes no memory*",
    ),
    Mutation(
        "an-end-without-memory-is-told-to-some-ranks", "communicator/tcp/detail/impl/hub.ipp",
        "for (; untold_ > 0; --untold_) {\n        send_end(untold_ - 1);",
        "for (int rank = std::exchange(untold_, 0); rank-- > 0;) {\n        send_end(rank);",
        "../trace/allocations.test.cpp", "where ranks meet by TCP without memory for*",
    ),
    Mutation(
        "a-late-rank-without-memory-is-not-told-of-the-end", "communicator/tcp/detail/impl/hub.ipp",
        "        untold_ = rank + 1; // if the memory runs out meanwhile\n", "",
        "../trace/allocations.test.cpp", "where ranks meet by TCP without memory for*",
    ),
    Mutation(
        "a-hub-without-memory-says-nothing", "communicator/tcp/detail/hub.hpp",
        "enough for a few words\n", "enough for a few words\n                throw;\n",
        "../trace/allocations.test.cpp", "where ranks meet by TCP without memory*",
    ),
    Mutation(
        "a-header-without-memory-is-lost", "communicator/tcp/detail/frame.hpp",
        "                place_ = place(std::as_const(header_), done_);\n                begin_ += sizeof header_; // not if that throws\n",
        "                begin_ += sizeof header_;\n                place_ = place(std::as_const(header_), done_);\n",
        "communicator/tcp/faults.test.cpp", "a frame without a place*",
    ),
    Mutation(
        "a-buffer-full-of-what-had-no-place-ends-the-connection", "communicator/tcp/detail/frame.hpp",
        "        parse(place, take); // what could not be taken before, also if nothing more comes\n", "",
        "communicator/tcp/faults.test.cpp", "a frame without a place*",
    ),
    Mutation(
        "a-frame-that-is-not-taken-is-lost", "communicator/tcp/detail/frame.hpp",
        "                take(std::as_const(header_));\n                has_header_ = false; // not if that throws\n",
        "                has_header_ = false;\n                take(std::as_const(header_));\n",
        "communicator/tcp/faults.test.cpp", "a frame without a place*",
    ),
    Mutation(
        "nccl-splits-with-any-control", "communicator/nccl/communicator.hpp",
        "return rank_.control().can_split();", "return true;",
        "communicator/nccl/lent.test.cpp", "a control communicator*",
    ),
    Mutation(
        "groups-of-processes-have-any-size", "communicator/detail/own_rank.hpp",
        " || size > max_ranks", "",
        "communicator/shared_memory/named_processes.test.cpp", "a rank is one of the world*",
    ),
    Mutation(
        "peers-in-flight-are-unsorted", "communicator/algorithms/detail/schedule_run.hpp",
        "return both_ranks(one.peer, sending_ ? step_.send.peer : one.peer);",
        "return {one.peer, sending_ ? step_.send.peer : one.peer};",
        "communicator/algorithms/communicator.test.cpp", "the peers of messages*",
    ),
    Mutation(
        "a-roll-call-is-a-sum-of-seven-numbers", "communicator/detail/descriptor.hpp",
        "if (is_agreement()) {", "if (false) {",
        "communicator/shared_memory/thread.test.cpp", "a collective beside a guard*",
    ),
    # -- sharded optimizers ---------------------------------------------------------------------------
    Mutation(
        "ranks-of-a-group-step-by-their-own-settings", "participant/sharded/detail/settings.hpp",
        "if (always || round", "if (round",
        "participant/sharded_groups.test.cpp", "ranks of a group step by*",
    ),
    Mutation(
        "failures-in-groups-name-ranks-by-the-groups-numbers", "join/detail/guard_outcome.hpp",
        "if (!is_ours && groups_ != nullptr && !control().is_aborted()) {", "if (false) {",
        "participant/groups.test.cpp", "ranks that the failure of a group names*",
    ),
    Mutation(
        "gradients-stay-behind-when-a-module-is-converted", "interop/torch.hpp",
        "            gradient = gradient.to(tensor.device(), tensor.scalar_type());\n", "",
        "interop/torch_refresh.test.cpp", "a module that was trained is converted*",
    ),
    Mutation(
        "groups-compare-what-other-groups-have", "join/detail/impl/entry.ipp",
        "if (groups == nullptr || !groups->is_of_group(position)) {", "if (true) {",
        "participant/sharded_groups.test.cpp", "a sharded optimizer steps the expert*",
    ),
    Mutation(
        "joined-owners-keep-their-settings", "participant/sharded/optimizer.hpp",
        "settings_.share(comm_, words(), round, rules_, options_.shared, groups_, always);", "",
        "participant/zero_redundancy_optimizer.test.cpp", "learning rates*",
    ),
    Mutation(
        "shared-objects-do-not-travel", "participant/sharded/detail/settings.hpp",
        "one(object.data(), object.bytes());\n            }\n            for", "}\n            for",
        "participant/zero_redundancy_optimizer.test.cpp", "an infinite gradient*",
    ),
    Mutation(
        "masters-are-not-compared", "optimizer/impl/shard.ipp",
        "std::memcmp(&rounded, values, sizeof(Stored)) != 0", "false",
        "participant/zero_redundancy_optimizer.test.cpp", "values of 16 bits*",
    ),
    Mutation(
        "what-is-sent-from-where-it-is-has-a-bucket", "participant/sharded/optimizer.hpp",
        "return shard.count_packed(group.parameters, packed_counts_[turn]) * shard.element();",
        "return shard.count_packed(group.parameters, packed_counts_[turn]) * 0 + shard.bucket_bytes();",
        "../trace/allocations.test.cpp", "a large parameter of one owner*",
    ),
    Mutation(
        "large-pieces-of-flat-buckets-are-packed", "participant/sharded/detail/plan.hpp",
        "if (reaches_all) {", "if (false) {",
        "../trace/allocations.test.cpp", "a large parameter of one owner*",
    ),
    Mutation(
        "what-travels-alone-leaves-a-gap", "optimizer/impl/shard.ipp",
        "if (travels_alone(parameters, piece)) {\n            continue;\n        }",
        "if (travels_alone(parameters, piece)) {\n            from += piece.size * element();\n            continue;\n        }",
        "participant/zero_redundancy_optimizer.test.cpp", "a parameter that is sent from where it is*",
    ),
    Mutation(
        "pieces-that-travel-alone-are-stepped-twice", "optimizer/shard.hpp",
        "if (is_packed && travels_alone(parameters, piece)) {", "if (false) {",
        "participant/zero_redundancy_optimizer.test.cpp", "a parameter that is sent from where it is*",
    ),
    Mutation(
        "settings-of-engines-do-not-travel", "participant/sharded/detail/settings.hpp",
        "one(&settings_of(rule), sizeof(Settings));", "",
        "participant/local_optimizer.test.cpp", "an engine's optimizer steps*",
    ),
    Mutation(
        "indices-begin-anew-in-each-group", "optimizer/shard.hpp",
        "whole{shift + i, value", "whole{i, value",
        "participant/local_optimizer.test.cpp", "groups of an engine's*",
    ),
    Mutation(
        "engines-have-masters", "participant/sharded/detail/plan.hpp",
        "UpdateRule<Rule>,", "true,",
        "participant/local_optimizer.test.cpp", "an engine's optimizer*",
    ),
    Mutation(
        "engines-may-be-flat", "participant/sharded/detail/plan.hpp",
        "if (is_flat(options) && LocalOptimizer<Rule>) {", "if (false) {",
        "participant/local_optimizer.test.cpp", "what an engine's optimizer cannot*",
    ),
    Mutation(
        "memory-for-a-state-is-not-agreed-on", "participant/sharded/optimizer.hpp",
        'fail_together("consolidate()", [&](AgreementList& compared) {',
        "[](auto const& g) {\n                AgreementList list;\n                g(list);\n            }([&](AgreementList& compared) {",
        "../trace/allocations.test.cpp", "*an optimizer that is out of memory*",
    ),
    Mutation(
        "flat-pieces-begin-at-zero", "optimizer/impl/shard.ipp",
        "return whole + piece.begin * element();", "return whole;",
        "participant/sharding_property.test.cpp", "any training*",
    ),
    Mutation(
        "nobody-need-average", "participant/sharded/detail/impl/plan.ipp",
        "if (!std::binary_search(sorted.begin(), sorted.end(), value)) {", "if (false) {",
        "participant/zero_redundancy_optimizer.test.cpp", "a parameter whose gradient nobody averages*",
    ),
    Mutation(
        "frozen-later-is-stepped", "participant/sharded/detail/plan.hpp",
        "requires_grad() == was_frozen) {", "requires_grad() && was_frozen) {",
        "participant/zero_redundancy_optimizer.test.cpp", "a parameter that is frozen*",
    ),
    Mutation(
        "classes-of-rules-are-not-compared", "participant/sharded/detail/plan.hpp",
        'list.add("class of the rule", type_name<Rule>());', "",
        "participant/zero_redundancy_optimizer.test.cpp", "rules of different classes*",
    ),
    Mutation(
        "a-closure-runs-after-the-step", "join/joinable.hpp",
        "        return run_then(joinable, std::forward<Closure>(closure), step);",
        "        step();\n        return run_then(joinable, std::forward<Closure>(closure), [] {});",
        "participant/closure.test.cpp", "a step with a closure*",
    ),
    Mutation(
        "what-a-closure-throws-is-not-told", "join/joinable.hpp",
        "        return run_then(joinable, std::forward<Closure>(closure), step);",
        "        struct Then {\n            F const& step;\n            int before = std::uncaught_exceptions();\n"
        "            ~Then() noexcept(false) { if (std::uncaught_exceptions() == before) { step(); } }\n"
        "        } const then{step};\n        return std::forward<Closure>(closure)();",
        "participant/closure.test.cpp", "what a closure throws*",
    ),
    Mutation(
        "an-old-state-is-given", "participant/sharded/optimizer.hpp",
        "state_.reset(); // it is of an earlier step", "",
        "participant/zero_redundancy_optimizer.test.cpp", "*frees a state that was gathered",
    ),
    Mutation(
        "values-of-rank-zero-are-not-taken", "participant/sharded/optimizer.hpp",
        "values->run(comm_, 0);", "",
        "participant/zero_redundancy_optimizer.test.cpp", "parameters begin*",
    ),
    Mutation(
        "a-missing-gradient-counts-as-a-step", "optimizer/shard.hpp",
        "if (!gradient) {\n                    continue;\n                }\n                check_gradient_of(parameters, piece.parameter, value, gradient);\n                is_moved", "if (!gradient) {\n                    ++steps[piece.parameter];\n                    continue;\n                }\n                check_gradient_of(parameters, piece.parameter, value, gradient);\n                is_moved",
        "participant/zero_redundancy_optimizer.test.cpp", "a parameter without a gradient*",
    ),
    Mutation(
        "settings-are-not-compared", "participant/sharded/optimizer.hpp",
        "detail::agree_on_rule(compared, rule);", "",
        "participant/zero_redundancy_optimizer.test.cpp", "rules and options*",
    ),
    Mutation(
        "two-may-average", "participant/sharded/zero_redundancy_optimizer.hpp",
        "guard.reduces == optimizer_options().reduces_gradients", "!guard.reduces && !optimizer_options().reduces_gradients",
        "participant/zero_redundancy_optimizer.test.cpp", "a guard in which nobody averages*",
    ),
    Mutation(
        "the-smallest-parameter-comes-first", "optimizer/impl/partition.ipp",
        "sizes[a] > sizes[b]", "sizes[a] < sizes[b]",
        "participant/zero_redundancy_optimizer.test.cpp", "parameters are dealt out*",
    ),
    Mutation(
        "groups-do-not-share-the-load", "participant/sharded/optimizer.hpp",
        "group.first = detail::parameter_count(groups_);",
        "group.first = detail::parameter_count(groups_);\n        std::fill(loads_.begin(), loads_.end(), std::size_t{0});",
        "participant/zero_redundancy_optimizer.test.cpp", "parameters are dealt out*",
    ),
    Mutation(
        "steps-are-not-loaded", "participant/sharded/detail/group.hpp",
        "group.steps[i] = parameters[group.first + i].steps;", "",
        "participant/zero_redundancy_optimizer.test.cpp", "state moves*",
    ),
    Mutation(
        "clipping-forgets-other-owners", "participant/sharded/detail/before_step.hpp",
        "complete(comm_.all_reduce(all, ReduceOp::sum));", "",
        "participant/zero_redundancy_optimizer.test.cpp", "gradients are clipped*",
    ),
    Mutation(
        "largest-gradients-of-owners-are-added", "participant/sharded/detail/before_step.hpp",
        "complete(comm_.all_reduce({first, count, DType::i64}, ReduceOp::max));",
        "complete(comm_.all_reduce(all, ReduceOp::sum));",
        "participant/clipping.test.cpp", "gradients are clipped by a norm*",
    ),
    Mutation(
        "powers-that-are-computed-on-the-host-are-not-sent", "participant/sharded/detail/before_step.hpp",
        "            device.upload(numbers, first, all.bytes());\n", "",
        "participant/clipping.test.cpp", "gradients are clipped by a norm*",
    ),
    Mutation(
        "powers-of-earlier-steps-are-kept", "participant/sharded/detail/before_step.hpp",
        "            std::fill_n(numbers, count, 0.0);\n", "",
        "participant/clipping.test.cpp", "gradients are clipped by a norm*",
    ),
    Mutation(
        "gradients-are-read-before-they-are-copied", "participant/sharded/detail/before_step.hpp",
        "        device.submit();\n        if (copy_", "        if (copy_",
        "communicator/nccl/sharded.test.cpp", "norms of any type*",
    ),
    Mutation(
        "a-maximum-is-this-rank-s-own", "participant/sharded/detail/before_step.hpp",
        "host_.all_reduce({keys.data(), keys.size(), DType::i64}, ReduceOp::max).wait();", "",
        "participant/clipping.test.cpp", "a maximum is over all ranks*",
    ),
    Mutation(
        "negative-maxima-are-in-reverse", "participant/sharded/detail/before_step.hpp",
        "bits < 0 ? bits ^ std::numeric_limits<std::int64_t>::max() : bits", "bits",
        "participant/clipping.test.cpp", "a maximum is over all ranks*",
    ),
    Mutation(
        "a-negative-nan-is-the-least", "participant/sharded/detail/before_step.hpp",
        "std::isnan(number) ? std::numeric_limits<double>::quiet_NaN() : number", "number",
        "participant/clipping.test.cpp", "a maximum is over all ranks*",
    ),
    Mutation(
        "a-norm-has-no-root", "optimizer/impl/before_step.ipp",
        "std::pow(sum, 1 / power)", "sum",
        "participant/clipping.test.cpp", "norms are those*",
    ),
    Mutation(
        "the-largest-magnitude-forgets-nan", "device/combined_terms.hpp",
        "a >= b || a != a ? a : b", "a >= b ? a : b",
        "participant/clipping.test.cpp", "a norm of infinite type is NaN*",
    ),
    Mutation(
        "a-norm-that-is-not-finite-clips", "optimizer/impl/before_step.ipp",
        "options_.error_if_nonfinite && !std::isfinite(norm_)", "false",
        "participant/clipping.test.cpp", "a norm that is not finite*",
    ),
    Mutation(
        "small-elements-stay-too-small", "optimizer/impl/before_step.ipp",
        "element = opposite;", "",
        "participant/clipping.test.cpp", "gradients are clipped by value*",
    ),
    Mutation(
        "squares-of-earlier-steps-are-added", "participant/sharded/detail/before_step.hpp",
        "device.fill_zero({first, DType::f64, {count}, {1}, device.id()});", "",
        "participant/zero_redundancy_optimizer.test.cpp", "gradients are clipped*",
    ),
    Mutation(
        "clipped-gradients-are-as-they-were", "optimizer/impl/before_step.ipp",
        "gradients.scale(factor);", "",
        "participant/zero_redundancy_optimizer.test.cpp", "gradients are clipped*",
    ),
    Mutation(
        "squares-are-added-in-one-run", "device/combined_terms.hpp",
        "if (done % square_block == 0) {", "if (false) {",
        "device/squares.test.cpp", "squares are summed in the order*",
    ),
    Mutation(
        "a-first-step-is-damped", "optimizer/rules.hpp",
        "update.is_first = step == 1;", "update.is_first = false;",
        "optimizer/rules.test.cpp", "rules step*",
    ),
    Mutation(
        "the-largest-square-is-forgotten", "optimizer/rules.hpp",
        "largest = largest > square_average ? largest : square_average;", "largest = square_average;",
        "optimizer/rules.test.cpp", "rules step*",
    ),
    Mutation(
        "copied-gradients-are-kept", "participant/sharded/detail/gradients_for_owners.hpp",
        "if (is_on_host(device())) {\n            parameters_[i].release_grad();", "if (false) {\n            parameters_[i].release_grad();",
        "participant/sharded_data_parallel.test.cpp", "gradients become ready*",
    ),
    Mutation(
        "sharded-values-are-saved-in-another-order", "checkpoint/detail/model_layout.hpp",
        "            part.order = dense_strides(value.extents(), value.strides());\n        }\n        return part;", "        }\n        return part;",
        "checkpoint/checkpoint.test.cpp", "values that are sharded*",
    ),
    Mutation(
        "gradients-wait-for-values-that-are-kept", "participant/sharded/detail/to_owners.hpp",
        "units_->is_due(i) && units_->approach(i)", "false",
        "participant/sharded_parameters.test.cpp", "gradients travel while*",
    ),
    Mutation(
        "all-values-keep-their-memory", "participant/sharded/detail/units.hpp",
        "arenas_.keep(overlapping);", "",
        "participant/sharded_parameters.test.cpp", "all values need memory*",
    ),
    Mutation(
        "values-stay-after-their-use", "participant/sharded/detail/units.hpp",
        "group.parameters[i - group.first].release_value();", "",
        "participant/sharded_parameters.test.cpp", "two units have memory*",
    ),
    Mutation(
        "gradients-go-before-the-next-gather", "participant/sharded/detail/units.hpp",
        "(std::min)(reduced_ + 2, units_.size())", "reduced_",
        "participant/sharded_parameters.test.cpp", "units are gathered once*",
    ),
    Mutation(
        "a-gather-goes-before-older-gradients", "participant/sharded/detail/units.hpp",
        "reduces_ && reduced_ + 1 < launched_", "false",
        "participant/sharded_parameters.test.cpp", "units are gathered once*",
    ),
    Mutation(
        "a-unit-goes-with-its-first-value", "participant/sharded/detail/units.hpp",
        "holders == 0 && unit != current_", "holders == 0",
        "participant/sharded_parameters.test.cpp", "sharded values are those*",
    ),
    Mutation(
        "units-of-the-user-are-ignored", "participant/sharded/detail/plan.hpp",
        "trained, choices.units, options", "trained, {}, options",
        "participant/sharded_parameters.test.cpp", "units have the parameters*",
    ),
    Mutation(
        "values-that-left-their-bucket-are-sent", "participant/sharded/detail/plan.hpp",
        "group.values->check();", "",
        "participant/bucket_values.test.cpp", "weights are loaded*",
    ),
    Mutation(
        "buckets-of-before-ask-parameters-that-have-ended", "participant/sharded/detail/value_store.hpp",
        "parts_[i].value = {};", "",
        "participant/refresh_sharded.test.cpp", "a parameter may end*",
    ),
    Mutation(
        "values-outlive-their-bucket", "participant/sharded/detail/impl/value_store.ipp",
        "parts_[i].whole.release_value();", "",
        "participant/bucket_values.test.cpp", "values in buckets are those*",
    ),
    Mutation(
        "values-are-held-through-a-step", "participant/sharded/detail/units.hpp",
        "units_[k].holders != 0", "false",
        "participant/sharded_parameters.test.cpp", "what a pass does wrong*",
    ),
    Mutation(
        "gradients-that-all-ranks-have-are-summed", "participant/sharded/detail/before_step.hpp",
        "if (sharding_ != Sharding::none) {", "if (true) {",
        "participant/sharded_data_parallel.test.cpp", "an infinite gradient*",
    ),
    Mutation(
        "only-owners-read-state-that-all-keep", "checkpoint/checkpoint.hpp",
        "layout->kept_state()", "layout->own_state()",
        "checkpoint/checkpoint.test.cpp", "what ranks wrote with one sharding*",
    ),
    Mutation(
        "some-ranks-skip-a-step", "participant/sharded/detail/before_step.hpp",
        "steppers != 0 && steppers != ranks", "false",
        "participant/sharded_data_parallel.test.cpp", "a step that some ranks skip*",
    ),
    Mutation(
        "a-missing-gradient-counts-as-zeros", "participant/sharded/detail/gradients_for_owners.hpp",
        "!has(i) && !parameters_[i].can_set_grad()", "false",
        "participant/sharded_data_parallel.test.cpp", "a gradient that is ready but not there*",
    ),
    Mutation(
        "a-step-steps-what-is-sharded", "participant/sharded/data_parallel.hpp",
        "guard.steps && guard.lists_all_averaged && guard.averaged.empty()", "false",
        "participant/sharded_data_parallel.test.cpp", "a Step that has nothing*",
    ),
    Mutation(
        "a-shard-is-stepped-while-it-is-gathered", "participant/sharded/detail/to_owners.hpp",
        "(!units_ || units_->is_gathered(unit_of(stepped_)))", "true",
        "participant/sharded_parameters.test.cpp", "a value that a pass reads late*",
    ),
    Mutation(
        "early-steps-take-no-settings", "participant/sharded/data_parallel.hpp",
        "begin = [this](Round const& round) { this->begin_step(round, this->has_refresh()); };", "",
        "participant/sharded_data_parallel.test.cpp", "buckets are stepped while*",
    ),
    Mutation(
        "a-large-file-is-synced-at-once", "checkpoint/detail/tensor_part.hpp",
        "if (unsynced_ >= bytes_per_sync) {", "if (false) {",
        "checkpoint/detail/file.test.cpp", "a rank that writes much*",
    ),
    Mutation(
        "a-large-part-is-hashed-without-a-sign-of-life", "checkpoint/detail/tensor_part.hpp",
        "            renewal.has_passed(some * element);\n        }\n        return sum;", "        }\n        return sum;",
        "checkpoint/detail/file.test.cpp", "a checkpoint renews deadlines*",
    ),
    Mutation(
        "only-own-elements-count-for-a-sign-of-life", "checkpoint/detail/tensor_part.hpp",
        "if (i % places.size() == places.size() - 1) {", "if (filled != 0 && i % places.size() == places.size() - 1) {",
        "checkpoint/detail/file.test.cpp", "a rank says that it is alive each 8 MiB*",
    ),
    Mutation(
        "every-few-elements-are-a-sign-of-life", "agreement/on_all_ranks.hpp",
        "if (bytes_ >= piece_bytes) {", "if (bytes_ != 0) {",
        "checkpoint/detail/file.test.cpp", "a rank says that it is alive each 8 MiB*",
    ),
    Mutation(
        "a-limit-of-file-sizes-kills-a-rank-that-writes", "checkpoint/detail/file.hpp",
        "exceeds_file_limit(at + bytes)", "false",
        "checkpoint/faults.test.cpp", "a rank without room*",
    ),
    Mutation(
        "folders-must-sync", "checkpoint/detail/file.hpp",
        "sync_by(::fsync, EINVAL);", "sync_by(::fsync);",
        "checkpoint/detail/file.test.cpp", "a folder that cannot be synced*",
    ),
    Mutation(
        "early-steps-wait-for-the-end-of-the-pass", "participant/sharded/detail/to_owners.hpp",
        "++finished_;\n            step_reduced();", "++finished_;",
        "participant/sharded_data_parallel.test.cpp", "buckets are stepped while*",
    ),
    Mutation(
        "joined-ranks-shadow-a-backward-pass-of-evaluations", "participant/gradient_participant.hpp",
        "model_collectives_.follow(round);\n                hooks().finish_passes(trains);",
        "model_collectives_.follow(round);\n                hooks().finish_passes(true);",
        "participant/sharded_parameters.test.cpp", "rounds that evaluate*",
    ),
    Mutation(
        "a-part-of-a-sum-is-not-scaled", "communicator/shared_memory/engine/impl/exchange.ipp",
        "{scales ? ranks : 0, factor}", "{scales && block.to == every_rank ? ranks : 0, factor}",
        "communicator/shared_memory/thread.test.cpp", "a scaled sum multiplies*",
    ),
    Mutation(
        "gradients-of-16-bits-are-rounded-twice", "participant/sharded/detail/exchange.hpp",
        "sum_scales_parts(comm) && factor != 0.0", "false",
        "participant/sharded_data_parallel.test.cpp", "every dtype*trains sharded",
    ),
    Mutation(
        "a-bucket-that-got-no-memory-goes-on-without", "participant/sharded/detail/gradients_for_owners.hpp",
        "slot.arena =\n                arenas_.take(buffer.bytes());", "slot.arena = 0;\n            slot.arena = arenas_.take(buffer.bytes());",
        "participant/sharded_data_parallel.test.cpp", "a bucket that got no memory*",
    ),
    Mutation(
        "guards-abandon-iterations-with-a-map", "bucket/reducer.hpp",
        "if (!gradients_->receive_averages()) { // else a map", "if (true) { // else a map",
        "participant/without_pass.test.cpp", "an iteration that was left open*",
    ),
    Mutation(
        "each-bucket-has-memory-of-its-own", "participant/sharded/detail/gradients_for_owners.hpp",
        "are_taken(overlapping);", "are_taken(buckets_.size());",
        "participant/sharded_data_parallel.test.cpp", "gradients become ready*",
    ),
    Mutation(
        "unused-gradients-are-left-in-the-bucket", "bucket/detail/impl/iteration.ipp",
        "is_held ? gradients_.pack(i, factor_) : gradients_.zero(i);", "static_cast<void>(is_held);",
        "participant/sharded_data_parallel.test.cpp", "a parameter that no pass uses*,a batch that failed*",
    ),
    Mutation(
        "a-step-may-be-forgotten", "participant/gradient_participant.hpp",
        "if (stage_ == Stage::reduced) {", "if (stage_ == Stage::unsynced) {",
        "participant/sharded_data_parallel.test.cpp", "verbs out of order*",
    ),
    Mutation(
        "joined-ranks-step-in-rounds-that-accumulate", "participant/sharded/data_parallel.hpp",
        "if (round.will_sync()) {\n                sharded_.run(round);", "if (true) {\n                sharded_.run(round);",
        "participant/sharding_property.test.cpp", "any training*",
    ),
    Mutation(
        "a-model-and-its-sharded-optimizer-step-twice", "participant/sharded/data_parallel.hpp",
        "void list_averaged(std::vector<void const*>&) const noexcept {}", "",
        "participant/sharded_data_parallel.test.cpp", "a ZeroRedundancyOptimizer over*",
    ),
    Mutation(
        "references-are-no-addresses", "optimizer/update_rule.hpp",
        "if constexpr (!std::is_copy_assignable_v<T>) {", "if constexpr (false) {",
        "../fail/shared_object_with_reference.cpp ../fail/update_rule_with_reference.cpp", "*",
    ),
    Mutation(
        "shared-objects-may-have-addresses", "participant/sharded/zero_options.hpp",
        "!detail::has_address<std::remove_all_extents_t<T>>(),", "true,",
        "../fail/shared_object_with_reference.cpp", "*",
    ),
    Mutation(
        "a-copy-of-a-shared-object-refers-to-it", "participant/sharded/zero_options.hpp",
        "requires(!std::is_same_v<T, SharedObject>)", "requires(true)",
        "participant/zero_redundancy_optimizer.test.cpp", "a copy of a shared object*",
    ),
    Mutation(
        "parts-are-rounded-down", "participant/sharded/zero_memory.hpp",
        "parameters / divided_by + (parameters % divided_by != 0 ? 1 : 0)", "parameters / divided_by",
        "participant/zero_memory.test.cpp", "*",
    ),
    Mutation(
        "masters-of-any-type-are-counted", "participant/sharded/zero_memory.hpp",
        "masters && is_half_precision(dtype)", "masters",
        "participant/zero_memory.test.cpp", "*",
    ),
    Mutation(
        "whole-steps-are-counted-in-parts", "participant/sharded/zero_memory.hpp",
        "sharding == Sharding::none ? parameters : part", "part",
        "participant/zero_memory.test.cpp", "*",
    ),
    Mutation(
        "one-bucket-is-counted-twice", "participant/sharded/zero_memory.hpp",
        "whole > bucket ? 2 * bucket : bucket", "2 * bucket",
        "participant/zero_memory.test.cpp", "a model has*",
    ),
    Mutation(
        "views-count-as-copies", "participant/sharded/zero_memory.hpp",
        "views ? 0 : whole + 2 * bucket", "whole + 2 * bucket",
        "participant/zero_memory.test.cpp", "a model *",
    ),
    Mutation(
        "memory-for-no-ranks", "participant/sharded/zero_memory.hpp",
        "if (ranks < 1) {", "if (ranks < 0) {",
        "participant/zero_memory.test.cpp", "memory for no ranks*",
    ),
    Mutation(
        "integers-are-planned", "participant/sharded/zero_memory.hpp",
        "if (!is_floating_point(dtype)) {", "if (false) {",
        "participant/zero_memory.test.cpp", "memory for no ranks*",
    ),
    Mutation(
        "names-of-states-dangle", "optimizer/update_rule.hpp",
        "{ requires outlives_the_call<decltype(rule.state_names())>; };", "{ rule.state_names(); };",
        "../fail/update_rule_with_names_by_value.cpp", "*",
    ),
    Mutation(
        "a-state-that-is-loaded-where-it-is-is-freed-first", "participant/sharded/detail/state_exchange.hpp",
        "std::move(taken.begin(), taken.end(), rules.begin());",
        "gathered_.reset();\n        std::move(taken.begin(), taken.end(), rules.begin());",
        "participant/zero_redundancy_optimizer.test.cpp", "a gathered state*",
    ),
    Mutation(
        "settings-move-when-groups-are-added", "participant/sharded/optimizer.hpp",
        "Rule& kept = rules_.emplace_back(std::move(rule));",
        "std::deque<Rule> all = rules_;\n            all.push_back(std::move(rule));\n            rules_.swap(all);\n            Rule& kept = rules_.back();",
        "participant/zero_redundancy_optimizer.test.cpp", "the settings of a group stay*",
    ),
    Mutation(
        "settings-move-when-a-state-is-loaded", "participant/sharded/detail/state_exchange.hpp",
        "std::move(taken.begin(), taken.end(), rules.begin());",
        "std::deque<Rule> all(taken.begin(), taken.end());\n        rules.swap(all);",
        "participant/zero_redundancy_optimizer.test.cpp", "the settings of a group stay*",
    ),
    Mutation(
        "rules-keep-any-number-of-states", "optimizer/update_rule.hpp",
        "names > most_state_arrays) {", "false && names > most_state_arrays) {",
        "participant/zero_redundancy_optimizer.test.cpp", "a rule keeps at most eight*",
    ),
    Mutation(
        "a-reference-is-no-address", "optimizer/update_rule.hpp",
        "if constexpr (!std::is_copy_assignable_v<T>) {", "if constexpr (false) {",
        "optimizer/rules.test.cpp", "a rule with an address*",
    ),
    Mutation(
        "names-of-states-may-be-returned-by-value", "optimizer/update_rule.hpp",
        "concept outlives_the_call = std::is_lvalue_reference_v<Names> ||",
        "concept outlives_the_call = true || std::is_lvalue_reference_v<Names> ||",
        "optimizer/rules.test.cpp", "a rule with an address*",
    ),
    Mutation(
        "a-training-resumes-with-any-number-of-rules", "participant/sharded/optimizer.hpp",
        "if (rules.size() != groups_.size() || steps.size() != detail::parameter_count(groups_)) {",
        "if (steps.size() != detail::parameter_count(groups_)) {",
        "participant/zero_redundancy_optimizer.test.cpp", "settings and counts*",
    ),
    Mutation(
        "a-training-resumes-with-any-number-of-counts", "participant/sharded/optimizer.hpp",
        "if (rules.size() != groups_.size() || steps.size() != detail::parameter_count(groups_)) {",
        "if (rules.size() != groups_.size()) {",
        "participant/zero_redundancy_optimizer.test.cpp", "settings and counts*",
    ),
    Mutation(
        "owners-that-were-chosen-are-no-load", "participant/sharded/detail/plan.hpp",
        "loads[static_cast<std::size_t>(all_owners[trained[k]])] += sizes[k];", "static_cast<void>(k);",
        "participant/zero_redundancy_optimizer.test.cpp", "parameters are dealt out*",
    ),
    Mutation(
        "checkpoints-have-the-bytes-of-settings", "checkpoint/checkpoint.hpp",
        "state.rules.push_back(detail::stored_settings(rule));",
        "state.rules.push_back(detail::stored_settings(rule));\n"
        '            state.rules.back().emplace("bytes", detail::hex_of({reinterpret_cast<char const*>(&rule), '
        "sizeof(Rule)}));",
        "checkpoint/checkpoint.test.cpp", "files of equal trainings*",
    ),
    # -- all-reduces by messages --------------------------------------------------------------------
    Mutation(
        "partners-combine-in-two-orders", "communicator/algorithms/detail/message_schedule.hpp",
        "combine_whole(partner < index_, step);", "combine_whole(true, step);",
        "communicator/algorithms/message_schedule.test.cpp", "elements are combined in the order*",
    ),
    Mutation(
        "pieces-share-a-slot", "communicator/algorithms/detail/ring.hpp",
        "return of_block_ == 1 ? 0 : static_cast<int>(piece % 2);", "return 0;",
        "communicator/algorithms/message_schedule.test.cpp", "what a rank does in one step*",
    ),
    Mutation(
        "slots-of-the-longest-block", "communicator/algorithms/detail/message_schedule.hpp",
        "is_cut ? segment_ : longest_block);",
        "ElementRange{0, longest_block}.part(0, detail::segments_of(longest_block, segment_)).size());",
        "communicator/algorithms/message_schedule.test.cpp", "every rank gets*",
    ),
    Mutation(
        "operations-share-a-tag", "communicator/algorithms/detail/message_engine.hpp",
        "options_.tag + tag_offset", "options_.tag + 0 * tag_offset",
        "communicator/algorithms/communicator.test.cpp", "ranks that do not compare*",
    ),
    Mutation(
        "ranks-that-compare-find-nothing", "communicator/algorithms/detail/message_engine.hpp",
        "return compared_[0] == ~compared_[1];", "return true;",
        "communicator/algorithms/communicator.test.cpp", "ranks that compare*",
    ),
    Mutation(
        "a-single-rank-ignores-an-abort", "communicator/algorithms/detail/message_engine.hpp",
        "comm_.size() == 1 ? comm_.abort_reason() : std::nullopt", "std::optional<AbortReason>{}",
        "communicator/algorithms/communicator.test.cpp", "a single rank*",
    ),
    Mutation(
        "a-failed-message-is-kept-secret", "communicator/algorithms/detail/message_engine.hpp",
        "abort(blamed_on(rank(), reason_of(error)));", "",
        "communicator/algorithms/communicator.test.cpp", "a rank that fails tells*",
    ),
    # -- several machines -----------------------------------------------------------------------------
    Mutation(
        "works-of-any-transport-go-to-the-heap", "communicator/any_work.hpp",
        "capacity = 112", "capacity = 64", "../trace/allocations.test.cpp", "nothing is allocated in an iteration*",
    ),
    Mutation(
        "substitutes-do-not-compare-counts", "communicator/any/communicator.hpp",
        "if (auto difference = counts.difference()) {", "if (auto difference = std::optional<AbortReason>{}) {", "communicator/any/communicator.test.cpp", "tables of counts*",
    ),
    Mutation(
        "memory-of-nccl-ends-captures-of-its-device", "communicator/nccl/detail/arenas.hpp",
        "wait_for_cuda_device();", "static_cast<void>(cudaDeviceSynchronize());",
        "communicator/nccl/threads.test.cpp", "memory is given and taken*",
    ),
    Mutation(
        "places-that-nccl-writes-go-before-a-late-abort", "communicator/nccl/detail/rank.hpp",
        "handle_.keep(std::move(place));", "",
        "communicator/nccl/failure.test.cpp", "a split that NCCL finishes after a late abort*",
    ),
    Mutation(
        "memory-of-nccl-goes-before-a-late-abort", "communicator/nccl/detail/handle.hpp",
        "give_up(), std::exchange(kept_, nullptr));\n    }", "give_up());\n    }",
        "communicator/nccl/arena.test.cpp", "an arena that goes during a late abort*",
    ),
    Mutation(
        "memory-of-nccl-is-zeroed-on-the-callers-stream", "communicator/nccl/detail/arenas.hpp",
        "check_cuda(cudaMemsetAsync(data, 0, bytes, own.get())", "check_cuda(cudaMemsetAsync(data, 0, bytes, rank_.caller())",
        "communicator/nccl/threads.test.cpp", "memory of a communicator is zeroed*",
    ),
    Mutation(
        "any-transport-can-split", "communicator/detail/can_split.hpp",
        "return comm.can_split();", "return has_split<Comm>;",
        "communicator/hierarchical/split.test.cpp", "if the leaders cannot*",
    ),
    Mutation(
        "any-transport-has-deadlines", "communicator/control.hpp",
        "if constexpr (requires { comm_.exchange_deadline(deadline); }) {", "if constexpr (false) {",
        "communicator/hierarchical/split.test.cpp", "a level without deadlines*",
    ),
    Mutation(
        "any-transport-renews-deadlines", "communicator/control.hpp",
        "            return comm_.renew_deadline();", "            comm_.renew_deadline();",
        "communicator/any/communicator.test.cpp", "a guard says what*",
    ),
    Mutation(
        "files-need-a-control-that-renews-deadlines-over-nccl", "communicator/control.hpp",
        "            return comm_.renew_deadline();", "            comm_.keep_alive();\n            return true;",
        "communicator/nccl/failure.test.cpp", "keep_alive says what it needs*",
    ),
    Mutation(
        "guards-do-not-see-through-any-transport", "communicator/communicator.hpp",
        "return comm.identity();", "return std::addressof(comm);",
        "communicator/any/communicator.test.cpp", "a guard knows the communicator*",
    ),
    Mutation(
        "destroyed-substitutes-deliver-nothing", "communicator/substitute.hpp",
        "if (copies_.empty() || unwinding_.has_begun()) {", "if (true) {",
        "communicator/any/communicator.test.cpp", "a work that is destroyed*",
    ),
    Mutation(
        "guards-give-deadlines-back-in-their-order", "join/detail/impl/attachments.ipp",
        "for (; !before_.empty(); before_.pop_back()) {", "for (; !before_.empty(); before_.erase(before_.begin())) {\n        before_.front().first->exchange_deadline(before_.front().second); continue;",
        "join/attachments.test.cpp", "deadlines come back*",
    ),
    Mutation(
        "clearing-takes-the-batch-that-is-to-come", "join/detail/local_rounds.hpp",
        "bool const is_counted = opened_ && position >= next_position_ && accumulates(*opened_);", "bool const is_counted = false;",
        "participant/window.test.cpp", "a step hears of what was cleared*",
    ),
    Mutation(
        "substitutes-sum-in-what-they-read", "communicator/substitute.hpp",
        "Buffer const memory = memory_of(in_.count);", "Buffer const memory = read(in_);",
        "communicator/any/communicator.test.cpp", "parts arrive*",
    ),
    Mutation(
        "substitutes-forget-the-root", "communicator/substitute.hpp",
        "out_.data == nullptr ? copied(in_, memory_of(in_.count)) : out_", "read(in_)",
        "communicator/any/communicator.test.cpp", "sums are scaled*",
    ),
    Mutation(
        "substitutes-copy-what-may-change", "communicator/substitute.hpp",
        "if (memory_.count >= count) {", "if (false) {",
        "communicator/substitute.test.cpp", "a substitute sums in the memory*",
    ),
    Mutation(
        "substitutes-scale-what-the-sum-scales", "communicator/substitute.hpp",
        "is_scaled(signature_.collective) && !can_scale", "is_scaled(signature_.collective)",
        "communicator/substitute.test.cpp", "each rank gets its part*",
    ),
    Mutation(
        "ranks-around-machines-ask-their-own-levels", "communicator/hierarchical/detail/engine.hpp",
        "levels_.can_split = sizes.back() == 0;", "levels_.can_split = levels_.can_split_here();",
        "communicator/hierarchical/split.test.cpp", "if the leaders cannot be split*",
    ),
    Mutation(
        "a-level-that-refuses-a-group-ends-all-ranks", "communicator/hierarchical/detail/engine.hpp",
        "end_by(reason_on(whole, level));", "throw;",
        "communicator/hierarchical/split.test.cpp", "a group that machines of a level*",
    ),
    Mutation(
        "a-refusal-hides-why-a-level-has-ended", "communicator/hierarchical/detail/engine.hpp",
        "end_by(reason_on(whole, level));", "if (whole.is_aborted()) { throw; }",
        "communicator/hierarchical/split.test.cpp", "a level that refuses a group when it was aborted*",
    ),
    Mutation(
        "groups-of-machines-split-as-their-parent", "communicator/hierarchical/detail/engine.hpp",
        "return answers[as_index(member)] == cannot;", "return false && member;",
        "communicator/hierarchical/split.test.cpp", "a group whose leaders cannot be split again*",
    ),
    Mutation(
        "groups-of-machines-split-as-other-groups", "communicator/hierarchical/detail/engine.hpp",
        "return answers[as_index(member)] == cannot;", "return member >= 0 && std::count(answers.begin(), answers.end(), cannot);",
        "communicator/hierarchical/split.test.cpp", "a group whose leaders cannot be split again*",
    ),
    Mutation(
        "leaders-that-split-are-called-late", "communicator/hierarchical/detail/engine.hpp",
        "2 * (std::min)(deadline_, longest / 2)", "deadline_",
        "communicator/hierarchical/split.test.cpp", "leaders may take longer*",
    ),
    Mutation(
        "machines-make-groups-that-others-refuse", "communicator/hierarchical/detail/engine.hpp",
        "refused); others != 0) {", "refused); refusal) {",
        "communicator/hierarchical/split.test.cpp", "a group that machines of a level*",
    ),
    Mutation(
        "leaders-without-split-are-split", "communicator/hierarchical/communicator.hpp",
        "if (!can_split()) {", "if (false) {",
        "communicator/hierarchical/split.test.cpp", "if the leaders cannot be split*",
    ),
    Mutation(
        "a-level-of-one-rank-needs-a-deadline", "communicator/hierarchical/detail/engine.hpp",
        "!own_deadline(level) && level.size() > 1", "!own_deadline(level)",
        "communicator/hierarchical/communicator.test.cpp", "a level of one rank*",
    ),
    Mutation(
        "ranks-keep-the-numbers-of-their-level", "communicator/hierarchical/detail/machines.hpp",
        "        rank = number;\n", "",
        "communicator/hierarchical/communicator.test.cpp", "ranks that run different*",
    ),
    Mutation(
        "ranks-around-machines-become-their-own", "communicator/hierarchical/detail/machines.hpp",
        "reason.origin - around : -1;", "-1 : -1;",
        "communicator/hierarchical/communicator.test.cpp", "machines of machines*",
    ),
    Mutation(
        "a-rank-that-left-ends-groups-of-others", "communicator/hierarchical/detail/engine.hpp",
        "if (!reason || reason->has_left) {", "if (!reason) {",
        "communicator/hierarchical/split.test.cpp", "groups over machines go on*",
    ),
    Mutation(
        "levels-forget-who-has-left", "communicator/hierarchical/detail/engine.hpp",
        "reason = *std::move(told);", "",
        "communicator/hierarchical/communicator.test.cpp", "a rank that leaves*",
    ),
    Mutation(
        "leaders-hear-nothing-of-their-machines", "communicator/hierarchical/detail/engine.hpp",
        "end_by(reason_on(local_, Level::local));", "",
        "communicator/hierarchical/communicator.test.cpp", "a leader that waits*",
    ),
    Mutation(
        "levels-that-are-left-end-a-collective", "communicator/hierarchical/detail/engine.hpp",
        "first.stage != Stage::moving ||", "true ||",
        "communicator/hierarchical/communicator.test.cpp", "what happens on a level*",
    ),
    Mutation(
        "a-waiting-leader-gives-no-sign-of-life", "communicator/hierarchical/detail/engine.hpp",
        "            last_sign_ = now;\n            keep_alive();", "            last_sign_ = now;",
        "communicator/hierarchical/communicator.test.cpp", "a slow rank that says*",
    ),
    Mutation(
        "ranks-of-machines-post-before-they-have-compared", "communicator/hierarchical/detail/engine.hpp",
        "            if (operation.stage != Stage::moving) {\n                return;\n            }\n", "",
        "communicator/hierarchical/collectives.test.cpp", "collectives of all kinds*",
    ),
    Mutation(
        "machines-do-not-compare-tables", "communicator/hierarchical/detail/engine.hpp",
        "            if (operation.comparison.go_on(",
        "            if (tells_parts(signature) && operation.comparison.go_on(",
        "communicator/hierarchical/collectives.test.cpp", "*whatever one rank of any machine*",
    ),
    Mutation(
        "machines-do-not-compare-counts", "communicator/hierarchical/detail/engine.hpp",
        "end_by(operation.comparison.difference());", "",
        "communicator/hierarchical/collectives.test.cpp", "ranks of other machines whose*",
    ),
    Mutation(
        "a-lone-rank-of-a-machine-does-not-scale", "communicator/hierarchical/detail/level_plan.hpp",
        " && !is_scaled(step.signature.collective);", ";",
        "communicator/hierarchical/collectives.test.cpp", "every sum of floats*",
    ),
    Mutation(
        "a-scatter-writes-to-its-input", "communicator/hierarchical/detail/level_plan.hpp",
        "if (has_root() && machines_.count() > 1) {", "if (false) {",
        "communicator/hierarchical/collectives.test.cpp", "a scatter only reads*",
    ),
    Mutation(
        "ranks-of-nccl-are-on-one-machine", "communicator/nccl/detail/control.hpp",
        "if (comm.is_aborted()) {", "if (true) {",
        "communicator/nccl/failure.test.cpp", "ranks on several machines*",
    ),
    Mutation(
        "a-forked-process-joins-a-thread-that-it-lacks", "communicator/progress_thread.hpp",
        "if (!home_.is_here()) {", "if (false) {",
        "communicator/shared_memory/progress_thread.test.cpp", "a process that is forked*",
    ),
    Mutation(
        "a-leader-sums-in-its-own-buffer", "communicator/hierarchical/detail/level_plan.hpp",
        "at_leader(in_.count, has_root() ? out_ : Buffer{})",
        "at_leader(in_.count, {const_cast<void*>(in_.data), in_.count, in_.dtype})",
        "communicator/hierarchical/collectives.test.cpp", "every rank of every machine*",
    ),
    Mutation(
        "gloo-interrupts-who-sends", "communicator/gloo/detail/mesh.hpp",
        "::sched_setscheduler(0, SCHED_BATCH, &none) == 0;", "::sched_setscheduler(0, SCHED_OTHER, &none) == 0;",
        "communicator/gloo/meeting.test.cpp", "*takes no core*",
    ),
    Mutation(
        "gloo-leaves-a-caller-in-batch", "communicator/gloo/detail/mesh.hpp",
        "            ::sched_setscheduler(0, SCHED_OTHER, &none);\n", "            static_cast<void>(none);\n",
        "communicator/gloo/meeting.test.cpp", "*takes no core*",
    ),
    # -- how a bucket travels ---------------------------------------------------------------------
    Mutation(
        "residuals-are-spent-before-a-round-has-ended", "bucket/compression/detail/feedback.hpp",
        "T const* const residual = this->residual<T>(run.parts[k].parameter);",
        "T* const residual = this->residual<T>(run.parts[k].parameter);\n"
        "        struct Spent { T* at; std::size_t n; ~Spent() { std::fill_n(at, n, T{0}); } }"
        " spent{residual, run.parts[k].count};",
        "bucket/compression_faults.test.cpp", "an exception at any collective*",
    ),
    Mutation(
        "powersgd-keeps-nothing", "bucket/compression/detail/steps.hpp",
        "to[j] = from[j] - row[j];", "to[j] = 0 * (from[j] - row[j]);",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "powersgd-takes-rows-for-longer-than-they-are", "device/step.hpp",
        "squared > 0 ? inner_product(block, before, row, count) / squared : 0;",
        "squared > 0 ? inner_product(block, before, row, count) : 0;",
        "bucket/compression.test.cpp", "a matrix of rank 2 travels*",
    ),
    Mutation(
        "powersgd-begins-a-round-early", "bucket/compression/power_sgd.hpp",
        "return rounds >= start_iteration;", "return rounds + 1 >= start_iteration;",
        "bucket/compression.test.cpp", "*PyTorch*,*bytes that*",
    ),
    Mutation(
        "powersgd-keeps-a-direction-of-zeros", "bucket/compression/detail/steps.hpp",
        "if (inner_product(HostBlock{}, row, row, count) > 0) {", "{",
        "bucket/compression.test.cpp", "*gradients of zeros*",
    ),
    Mutation(
        "topk-sends-what-it-keeps", "bucket/compression/top_k.hpp",
        "inputs[own[at]] = 0; // it was sent", "",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "residuals-become-what-is-not-finite", "bucket/compression/detail/feedback.hpp",
        "if (are_finite(run.buffer)) {", "if (true) {",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "topk-sends-residuals-in-a-round-of-nobody", "bucket/compression/top_k.hpp",
        "if (contributors == 0) {", "if (false) {",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "int8-loses-what-the-sum-rounds", "bucket/compression/int8.hpp",
        "lost[i] += sum[i];", "",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "residuals-end-with-a-rebuild", "bucket/compression/detail/feedback.hpp",
        "if (mine.memory.bytes() != bytes_of(part)) {", "{",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "casts-leave-the-factor-out", "bucket/compression/cast_to.hpp",
        "cast_step(run.buffer, factor, other.buffer)", "cast_step(run.buffer, 1.0 + 0.0 * factor, other.buffer)",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "powersgd-delivers-what-nobody-contributed", "bucket/compression/power_sgd.hpp",
        "product.only_if = verdict;", "",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "powersgd-keeps-what-is-not-finite", "bucket/compression/power_sgd.hpp",
        "rest.only_if = verdict + 1;", "",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    Mutation(
        "powersgd-begins-with-what-is-not-finite", "bucket/compression/power_sgd.hpp",
        "                 .only_if = verdict + 1,\n", "",
        "participant/compression_property.test.cpp", "*",
    ),
    Mutation(
        "residuals-do-not-follow-the-loss-scale", "bucket/compression/detail/feedback.hpp",
        "cast_step(numbers, factor, numbers)", "cast_step(numbers, 1.0 + 0 * factor, numbers)",
        "participant/compression_property.test.cpp", "*",
    ),
    Mutation(
        "a-device-computes-without-kernels", "bucket/compression/detail/steps.hpp",
        "if (!is_on_host(device) && !device.can_compute()) {", "if (false) {",
        "device/cuda/compression.test.cpp", "*refused in a sentence*",
    ),
    Mutation(
        "a-message-is-written-before-its-sums-are-read", "bucket/compression/power_sgd.hpp",
        "        compute_listed();\n        Message message = message_of(run);",
        "        Message message = message_of(run);",
        "device/cuda/compression.test.cpp", "*bits of the host's*",
    ),
    Mutation(
        "ranks-do-not-compare-settings-of-a-reduction", "bucket/bucket_reduction.hpp",
        "        reduction.agree_on(list);\n", "",
        "bucket/compression.test.cpp", "*settings that differ*",
    ),
    Mutation(
        "local-gradients-are-packed", "bucket/impl/gradients.ipp",
        "        if (!sends_) {\n            return;\n        }\n        if (factor",
        "        if (factor",
        "participant/no_reduction.test.cpp", "gradients stay bit for bit*",
    ),
    Mutation(
        "local-gradients-have-a-map", "bucket/impl/gradients.ipp",
        "receive_averages() const noexcept override { return sends_; }",
        "receive_averages() const noexcept override { return true; }",
        "participant/no_reduction.test.cpp", "buckets have memory*",
    ),
    Mutation(
        "local-gradients-are-cut-anew", "bucket/reducer.hpp",
        "is_rebuild_due_{detail::rebuilds(options) && sends}",
        "is_rebuild_due_{detail::rebuilds(options)}",
        "participant/no_reduction.test.cpp", "buckets have memory*",
    ),
    Mutation(
        "local-gradients-are-backed-up", "bucket/impl/gradients.ipp",
        "return travels_as_rows(i) || (!sends_ && !are_views_);",
        "return travels_as_rows(i);",
        "participant/no_reduction.test.cpp", "buckets have memory*",
    ),
    Mutation(
        "averages-that-fail-on-one-rank-are-told-nobody", "participant/periodic_average.hpp",
        "detail::abort_if_throws(comm_, [&] { average_values(); });", "average_values();",
        "participant/periodic_average.test.cpp", "where average() cannot*",
    ),
    Mutation(
        "joined-ranks-step-by-local-gradients", "join/detail/turn_order.hpp",
        "any(&ParticipantInfo::steps) && !any(&ParticipantInfo::leaves_local)",
        "any(&ParticipantInfo::steps)",
        "participant/periodic_average.test.cpp", "a Step beside*",
    ),
    Mutation(
        "a-local-model-has-a-window", "join/detail/entrant.hpp",
        "averages = averages && !joinable.leaves_gradients_local();",
        "",
        "participant/no_reduction.test.cpp", "*",
    ),
    Mutation(
        "cleared-local-gradients-clear-a-window", "participant/gradient_participant.hpp",
        "if (leaves_gradients_local() || !window()",
        "if (!window()",
        "participant/no_reduction.test.cpp", "a model that is averaged*",
    ),
    Mutation(
        "a-sharded-optimizer-steps-by-local-gradients", "join/detail/impl/entry.ipp",
        ": view.shards\n",
        ": false\n",
        "participant/no_reduction.test.cpp", "what averages or needs*",
    ),
    Mutation(
        "a-step-is-beside-both-kinds-of-gradients", "join/detail/impl/entry.ipp",
        ": view.steps && averages\n",
        ": false\n",
        "participant/no_reduction.test.cpp", "what averages or needs*",
    ),
    Mutation(
        "a-round-without-an-average-has-a-weight", "participant/gradient_participant.hpp",
        "if (leaves_gradients_local() && round.is_weighted()) {",
        "if (false) {",
        "participant/no_reduction.test.cpp", "a weight is refused*",
    ),
    Mutation(
        "local-gradients-are-averaged-by-another-model", "participant/data_parallel.hpp",
        "                claims.add_averaged(parameters[i].grad(), i);\n",
        "",
        "participant/no_reduction.test.cpp", "what averages or needs*",
    ),
    Mutation(
        "an-average-claims-no-values", "participant/periodic_average.hpp",
        "{ claims.add_averaged_values(parameters_); }",
        "{ (void)claims; }",
        "participant/no_reduction.test.cpp", "what averages or needs*",
    ),
    Mutation(
        "values-that-differ-on-purpose-are-synced", "participant/data_parallel.hpp",
        ": options.sync_at_end\n",
        ": false\n",
        "participant/no_reduction.test.cpp", "what averages or needs*",
    ),
    Mutation(
        "a-step-whose-round-fails-has-no-weight", "participant/periodic_average.hpp",
        "            Round const round = notify_join_context(*this);\n            detail::run_part(*this, round, [&] { end_round(); });",
        "            steps_ -= steps;\n            Round const round = notify_join_context(*this);\n            steps_ += steps;\n"
        "            detail::run_part(*this, round, [&] { end_round(); });",
        "participant/periodic_average.test.cpp", "*where its round fails*",
    ),
    Mutation(
        "parameters-that-were-left-out-are-read", "bucket/impl/gradients.ipp",
        "std::erase_if(trained_, [&](std::size_t i) { return !holds(i); });\n        return !trained_.empty();",
        "return std::any_of(trained_.begin(), trained_.end(), [&](std::size_t i) { return holds(i); });",
        "participant/refresh.test.cpp", "a parameter that is left out*",
    ),
    Mutation(
        "a-rank-leaves-without-its-places-of-shared-values", "participant/share_parameters.hpp",
        "            agree(control, {}, exception_of([&] {\n"
        "                      shared.emplace(std::move(list), std::move(memory));\n"
        "                      if (is_maker) {",
        "            shared.emplace(std::move(list), std::move(memory));\n"
        "            agree(control, {}, exception_of([&] {\n"
        "                      if (is_maker) {",
        "participant/share_parameters.test.cpp", "an engine whose value throws*",
    ),
    Mutation(
        "steps-of-a-start-that-failed-are-run-again", "bucket/compression/power_sgd.hpp",
        "listed.clear(); // those of a start that failed", "",
        "device/cuda/compression.test.cpp", "after a kernel that could not*",
    ),
    Mutation(
        "a-start-that-failed-has-made-its-matrices", "bucket/compression/power_sgd.hpp",
        "        compute_listed();\n        for_compressed(run, [&](std::size_t, Factors& mine) { mine.is_started = true; });",
        "        for_compressed(run, [&](std::size_t, Factors& mine) { mine.is_started = true; });\n        compute_listed();",
        "device/cuda/compression.test.cpp", "after a kernel that could not*",
    ),
    Mutation(
        "a-file-says-any-number-of-ranks", "checkpoint/checkpoint.hpp",
        "state.world_size == 0 || state.world_size > detail::max_world_size", "state.world_size == 0",
        "checkpoint/checkpoint.test.cpp", "a file with a wrong header*",
    ),
    Mutation(
        "values-are-averaged-in-the-dtype-of-gradients", "participant/periodic_average.hpp",
        "{ return list[i].value(); }", "{ return detail::like_gradient(list, i); }",
        "participant/periodic_average.test.cpp", "values of 16 bits*",
    ),
    Mutation(
        "an-average-leaves-out-what-was-unfrozen", "participant/periodic_average.hpp",
        "listed_->require_same(join_name(), false);", "",
        "participant/periodic_average.test.cpp", "a parameter that is unfrozen*",
    ),
    Mutation(
        "an-average-that-is-refused-on-one-rank-is-waited-for", "participant/periodic_average.hpp",
        "detail::abort_if_throws(comm_, require_same);", "require_same();",
        "participant/periodic_average.test.cpp", "*one rank alone has changed*",
    ),
    Mutation(
        "values-that-cannot-be-written-are-found-after-the-average", "participant/periodic_average.hpp",
        "if (!parameters_[i].is_as(listed_->listed()[i])) {", "if (false) {",
        "participant/periodic_average.test.cpp", "a rank that has stepped nothing*",
    ),
    Mutation(
        "values-of-a-rank-that-did-not-step-are-multiplied", "participant/periodic_average.hpp",
        "if (steps_ == 0) {", "if (steps_ == 77) {",
        "participant/periodic_average.test.cpp", "*has not stepped*",
    ),
    Mutation(
        "an-average-has-one-weight-for-all", "participant/periodic_average.hpp",
        "static_cast<double>(steps_) / static_cast<double>(total);",
        "(steps_ == 0 ? 0.0 : 1.0) / static_cast<double>(comm_.size());",
        "participant/periodic_average.test.cpp", "*by how often*",
    ),
    Mutation(
        "a-loss-scale-grows-after-a-skipped-step", "optimizer/impl/before_step.ipp",
        "        scale *= backoff;\n        steps = 0;", "        scale *= backoff;",
        "participant/zero_redundancy_optimizer.test.cpp", "LossScaler*",
    ),
    Mutation(
        "gradients-stay-scaled", "optimizer/impl/before_step.ipp",
        "gradients.scale(1.0 / scale);", "gradients.scale(1.0);",
        "participant/zero_redundancy_optimizer.test.cpp", "LossScaler*",
    ),
    Mutation(
        "factors-of-casts-are-checked-as-those-of-sums", "bucket/reducer.hpp",
        "rounds_factors<Comm, Reduction>()", "rounds_factors<Comm>()",
        "bucket/travel.test.cpp", "a cast multiplies*",
    ),
    Mutation(
        "gradients-of-f16-are-divided-and-rounded", "participant/sharded/detail/before_step.hpp",
        "device, *this, has_f16}", "device, *this, false && has_f16}",
        "participant/zero_redundancy_optimizer.test.cpp", "LossScaler refuses*",
    ),
    Mutation(
        "only-owners-of-f16-refuse-to-divide", "participant/sharded/detail/before_step.hpp",
        "shard.bucket().dtype == DType::f16;", "(shard.bucket().dtype == DType::f16 && !shard.kept().empty());",
        "participant/zero_redundancy_optimizer.test.cpp", "LossScaler refuses*",
    ),
    Mutation(
        "a-run-has-the-parts-of-its-bucket", "bucket/detail/run_parts.hpp",
        "return {parts_.data() + first_[bucket] + first, last - first};",
        "return {parts_.data() + first_[bucket] + 0 * first, last - first};",
        "bucket/compression.test.cpp", "*what ranks keep*",
    ),
    # -- what a user changes, or a process does, between two steps ------------------------------------
    Mutation(
        "a-checkpoint-takes-any-number-of-states", "checkpoint/checkpoint.hpp",
        "detail::check_before_save(zero_.groups(), zero_.rules());", "",
        "checkpoint/checkpoint.test.cpp", "a rule whose number*",
    ),
    Mutation(
        "consolidating-takes-any-number-of-states", "participant/sharded/detail/state_exchange.hpp",
        "check_before_save(groups, rules);", "",
        "checkpoint/checkpoint.test.cpp", "a rule whose number*",
    ),
    Mutation(
        "a-value-in-another-order-is-stepped", "participant/sharded/detail/plan.hpp",
        "    }\n    check_layouts(group);", "    }",
        "participant/zero_redundancy_optimizer.test.cpp", "a value whose elements*",
    ),
    Mutation(
        "state-of-another-order-is-consolidated", "participant/sharded/detail/plan.hpp",
        "        check_layouts(groups[k]);\n", "",
        "participant/zero_redundancy_optimizer.test.cpp", "a value whose elements*",
    ),
    Mutation(
        "masters-of-another-order-are-read", "participant/sharded/optimizer.hpp",
        "            } else {\n                detail::check_layouts(group);\n", "",
        "participant/zero_redundancy_optimizer.test.cpp", "masters are not read*",
    ),
    Mutation(
        "state-of-another-order-is-loaded", "participant/sharded/detail/state_exchange.hpp",
        "check_layouts(group); // state comes in the order of values", "",
        "participant/zero_redundancy_optimizer.test.cpp", "a value whose elements*",
    ),
    Mutation(
        "a-checkpoint-is-read-in-another-order", "checkpoint/checkpoint.hpp",
        "detail::check_layouts(group);", "",
        "checkpoint/checkpoint.test.cpp", "a checkpoint is not read while*",
    ),
    Mutation(
        "buckets-are-cut-by-what-values-are-now", "bucket/impl/bucket.ipp",
        "values.push_back(like[i]);", "values.push_back(parameters[i].value());",
        "bucket/rebuild.test.cpp", "buckets are cut anew with the strides*",
    ),
    Mutation(
        "an-optional-counts-as-a-pointer", "tensor/detail/handle_list.hpp",
        "} else if constexpr (holds_object<item_of<Range>>) {", "} else if constexpr (false) {",
        "tensor/tensor_list.test.cpp", "an optional holds its tensor*",
    ),
    Mutation(
        "a-variant-reduces-by-any-operation", "tensor/variant.hpp",
        "detail::traits_of<T>::check_reduction(tensor, op);\n", "static_cast<void>(tensor);\n",
        "participant/several_types.test.cpp", "what the traits of a tensor check*",
    ),
    Mutation(
        "a-lost-average-is-forgotten", "bucket/reducer.hpp",
        "has_lost_average_ = true;                   // unless this returns", "",
        "bucket/reducer.test.cpp", "an iteration whose averages*",
    ),
    Mutation(
        "gradients-without-memory-are-read", "bucket/impl/without_pass.ipp",
        "check_gradient(parameters, i, gradient);", "",
        "participant/window.test.cpp", "gradients whose memory was freed*",
    ),
    Mutation(
        "a-pass-that-is-over-ends-again", "participant/gradient_participant.hpp",
        "if (stage_ == Stage::backward) {\n                    model_collectives_.end(round_);",
        "{\n                    model_collectives_.end(round_);",
        "participant/shadowed.test.cpp", "a pass that is ended twice*",
    ),
    Mutation(
        "buffers-that-cannot-be-written-are-sent", "tensor/impl/tensor_list.ipp",
        "        require_writable(views_.size(), view);\n", "",
        "participant/module_state.test.cpp", "tensors that receivers could not*",
    ),
    Mutation(
        "complex-buffers-of-any-rank-are-planned", "tensor/impl/tensor_list.ipp",
        "static_cast<void>(as_reals(view)); //", "//",
        "participant/module_state.test.cpp", "complex tensors of too many*",
    ),
    Mutation(
        "strides-of-one-element-are-compared", "tensor/any_view.hpp",
        "a.extents()[d] != 1 && ", "",
        "participant/zero_redundancy_optimizer.test.cpp", "strides of a dimension*",
    ),
    Mutation(
        "strides-of-one-element-of-a-gradient-are-compared", "optimizer/shard.hpp",
        "return is_dense(value) && has_same_steps(value, other);",
        "return is_dense(value) && other.strides() == value.strides();",
        "participant/zero_redundancy_optimizer.test.cpp", "a gradient is laid out*",
    ),
    Mutation(
        "values-are-loaded-in-any-order", "participant/sharded/detail/impl/value_store.ipp",
        "check_layout(whole_, i, parts_[i].value);", "",
        "participant/sharded_parameters.test.cpp", "values that are loaded in another*",
    ),
    Mutation(
        "use-all-that-is-refused-keeps-memory", "participant/sharded/data_parallel.hpp",
        "units->free_reserve();", "",
        "participant/sharded_parameters.test.cpp", "use_all() that is refused*",
    ),
    Mutation(
        "all-values-that-fail-keep-memory", "participant/sharded/data_parallel.hpp",
        "            return units->hold_all();\n        } catch (...) {\n            units->free_reserve();\n"
        "            throw;\n        }\n",
        "        } catch (...) {\n            units->free_reserve();\n            throw;\n        }\n"
        "        return units->hold_all();\n",
        "participant/sharded_parameters.test.cpp", "use_all() that is refused*,all values that have no room*",
    ),
    Mutation(
        "values-of-another-type-are-not-there", "participant/sharded/detail/impl/value_store.ipp",
        "value && has_memory(value)\n", "false\n",
        "participant/sharded_parameters.test.cpp", "values that are loaded in another*",
    ),
    Mutation(
        "sgd-takes-any-dampening", "optimizer/rules.hpp",
        "if (!std::isfinite(dampening)) {", "if (false) {",
        "optimizer/rules.test.cpp", "settings that make no sense*",
    ),
    Mutation(
        "an-optional-that-is-empty-is-none", "agreement/agreement_list.hpp",
        'return is_optional<typename V::value_type> ? "a value (" + text + ")" : text;', "return text;",
        "agreement/agreement_list.test.cpp", "other values*",
    ),
    Mutation(
        "consolidating-frees-state-before-ranks-agree", "participant/sharded/detail/state_exchange.hpp",
        "check_before_save(groups, rules);\n", "check_before_save(groups, rules);\n            gathered_.reset();\n",
        "participant/zero_redundancy_optimizer.test.cpp", "where consolidate() is refused*",
    ),
    Mutation(
        "consolidating-takes-any-rank", "participant/sharded/detail/state_exchange.hpp",
        'check_rank("to_rank", to_rank, comm.size());', "",
        "participant/zero_redundancy_optimizer.test.cpp", "what cannot be sharded*",
    ),
    Mutation(
        "skip-sends-again-what-was-exchanged", "participant/gradient_participant.hpp",
        "stage_ = Stage::backward; // skip() can follow if `unused` throws\n"
        "            reducer_->prepare_for_backward(factor, unused, round_.buffer_source());",
        "reducer_->prepare_for_backward(factor, unused, round_.buffer_source());\n"
        "            stage_ = Stage::backward;",
        "participant/module_state.test.cpp", "a rank that skips its batch*",
    ),
    Mutation(
        "what-a-group-gives-back-stays-reserved", "communicator/shared_memory/board/impl/group_memory.ipp",
        "unreserve(begin, begin + zeros.bytes);", "static_cast<void>(begin);",
        "communicator/shared_memory/group/group.test.cpp", "a room reserves all*",
    ),
    Mutation(
        "a-refused-stranger-is-heard-until-it-pauses", "communicator/tcp/detail/handshake_server.hpp",
        "return stranger.socket.receive(ignored).has_value();",
        "for (;;) {\n"
        "                auto const got = stranger.socket.receive(ignored);\n"
        "                if (!got || *got == 0) {\n"
        "                    return got.has_value();\n"
        "                }\n"
        "            }",
        "communicator/tcp/meeting.test.cpp", "a stranger that is refused*",
    ),
    Mutation(
        "a-negative-number-of-inputs-is-huge", "join/detail/impl/attachments.ipp",
        ": inputs < 0 ? concat(", ": false ? concat(",
        "join/schedule.test.cpp", "a period of 0*",
    ),
    Mutation(
        "a-guard-forgets-a-window", "join/detail/impl/attachments.ipp",
        "if (state->session_ != nullptr && averages_ != Averages::none) {", "if (false) {",
        "participant/window.test.cpp", "a window over the end*",
    ),
    Mutation(
        "a-guard-begins-without-a-window", "join/detail/rounds.hpp",
        "window_ = window;", "static_cast<void>(window);",
        "participant/window.test.cpp", "a window over the end*",
    ),
    Mutation(
        "cleared-windows-keep-their-weight", "participant/gradient_participant.hpp",
        "if (leaves_gradients_local() || !window().may_be_cleared() ||\n            !reducer_->holds_accumulated() || !are_cleared()) {", "if (true) {",
        "participant/window.test.cpp", "a window over the end*",
    ),
    Mutation(
        "windows-are-not-looked-at-before-guards", "participant/gradient_participant.hpp",
        "return window().before_guard([this] { return are_cleared(); });", "return detail::Accumulated::none;",
        "participant/window.test.cpp",
    ),
    Mutation(
        "passes-without-gradients-look-cleared", "participant/gradient_participant.hpp",
        "!reducer_->holds_accumulated() ||", "",
        "participant/accumulation.test.cpp", "several forward passes*",
    ),
    Mutation(
        "schedules-forget-windows", "join/detail/impl/schedule.ipp",
        "(is_first_sync ? held_ : 0)", "0",
        "participant/window.test.cpp", "what a rank accumulated in one guard*",
    ),
    Mutation(
        "windows-are-cleared-after-their-weight-was-told", "join/detail/impl/session.ipp",
        "if (told.is_open()) {", "if (rounds_.is_scheduled() && told.is_open()) {",
        "participant/window.test.cpp", "clearing after*",
    ),
    Mutation(
        "skipped-evaluations-end-the-look", "participant/gradient_participant.hpp",
        "if (has_begun && round_.phase() == Phase::train) {\n                window().stop_looking();", "if (true) {\n"
        "                window().stop_looking();",
        "participant/window.test.cpp", "evaluations that open an epoch*",
    ),
    Mutation(
        "an-evaluation-counts-as-the-last-batch", "join/detail/impl/session.ipp",
        "bool const is_batch_open = !turns_.are_complete() && round_.phase() == Phase::train;",
        "bool const is_batch_open = !turns_.are_complete();",
        "participant/window.test.cpp", "evaluations that open an epoch*",
    ),
    Mutation(
        "participants-with-other-windows", "join/detail/impl/entry.ipp",
        "if (!window.holds_the_same(common)) {", "if (false) {",
        "participant/window.test.cpp", "participants of a guard that hold*",
    ),
    Mutation(
        "windows-of-ranks-are-not-compared", "join/detail/impl/session.ipp",
        "if (!failure && some_have && open >> without_weights != 0) {", "if (false) {",
        "participant/window.test.cpp", "ranks whose windows*",
    ),
    Mutation(
        "weights-may-begin-within-a-window", "join/detail/window.hpp",
        "if (is_open() && !notice.skips && notice.weight.has_value() != is_weighted) {", "if (false) {",
        "participant/window.test.cpp", "a window that began*",
    ),
    Mutation(
        "an-unused-forward-takes-the-window", "participant/gradient_participant.hpp",
        "detail::WindowEnd::reduction", "detail::WindowEnd::opening",
        "participant/window.test.cpp", "outside a guard*",
    ),
    Mutation(
        "sync-every-counts-evaluations", "join/detail/impl/rounds.ipp",
        "training_rounds_ += code.phase == Phase::train ? 1 : 0;", "++training_rounds_;",
        "participant/window.test.cpp", "sync_every counts*",
    ),
    Mutation(
        "untouched-gradients-lose-their-window", "join/detail/rounds.hpp",
        "return dropped_.is_open() ? dropped_ : window_;", "return window_;",
        "participant/window.test.cpp", "a joined rank that leaves*",
    ),
    Mutation(
        "sharded-windows-lose-what-a-pass-does-not-use", "bucket/detail/iteration.hpp",
        "accumulated_[i] ? take_used(i) : enter(i, State::unused);", "enter(i, State::unused);",
        "participant/window.test.cpp", "sharded gradients hold*",
    ),
    Mutation(
        "sharded-windows-send-what-no-pass-used", "bucket/detail/iteration.hpp",
        "may_be_unused() ? take_or_leave(i) : take(i);", "used_ ? take_or_leave(i) : take(i);",
        "participant/window.test.cpp", "a sharded batch that is skipped*",
    ),
    Mutation(
        "a-reduction-leaves-the-weight-of-its-window", "join/detail/window.hpp",
        "            *this = {};\n", "            *this = Window{0, 0, weight, is_weighted, 0, 0};\n",
        "participant/property.test.cpp", "any training*",
    ),
    Mutation(
        "clearing-in-a-round-forgets-its-batch", "join/detail/window.hpp",
        "*this = in_round\n", "*this = in_round && false\n",
        "participant/window.test.cpp", "a window over the end*",
    ),
    Mutation(
        "a-failed-guard-forgets-the-window", "join/detail/impl/attachments.ipp",
        "if (state->session_ != nullptr && averages_ != Averages::none) {",
        "if (state->session_ != nullptr && averages_ != Averages::none && state->session_->result()) {",
        "participant/property.test.cpp", "any training*",
    ),
    Mutation(
        "a-failed-guard-leaves-its-round-open", "participant/gradient_participant.hpp",
        "        stage_ = Stage::idle;\n        model_collectives_.reset();\n        reducer_->forget_words();",
        "        model_collectives_.reset();\n        reducer_->forget_words();",
        "participant/property.test.cpp", "any training*",
    ),
    Mutation(
        "a-failed-guard-of-shards-forgets-the-window", "join/detail/impl/attachments.ipp",
        "if (state->session_ != nullptr && averages_ != Averages::none) {",
        "if (state->session_ != nullptr && averages_ != Averages::none && state->session_->result()) {",
        "participant/sharding_property.test.cpp", "any training*",
    ),
    Mutation(
        "nobody-looks-after-a-guard", "join/detail/impl/attachments.ipp",
        "        state->local_rounds_ = nullptr;\n        state->may_be_cleared_ = true;",
        "        state->local_rounds_ = nullptr;",
        "participant/window.test.cpp",
    ),
    Mutation(
        "a-window-has-the-weight-of-its-last-batch", "join/detail/window.hpp",
        "weight += own;", "weight = own;",
        "participant/property.test.cpp", "any training*",
    ),
    Mutation(
        "engines-that-drop-gradients-get-zeros", "bucket/without_pass.hpp",
        "if (gradient && other == OtherGradient::none && parameter.can_release_grad() &&",
        "if (false && gradient && other == OtherGradient::none && parameter.can_release_grad() &&",
        "participant/property.test.cpp", "any training*",
    ),
    Mutation(
        "joined-ranks-leave-what-no-rank-used", "bucket/without_pass.hpp",
        "return !is_untouched() && !is_like_pass();", "return !has_joined && !is_like_pass();",
        "participant/property.test.cpp", "any training*",
    ),
    Mutation(
        "gradients-stay-in-memory-that-ends", "bucket/impl/gradients.ipp",
        "if (parameters_[i].can_release_grad() && holds(i)) {", "if (false) {",
        "participant/without_pass.test.cpp", "gradients that lie in buckets*",
    ),
    Mutation(
        "gradients-of-the-engine-end-with-the-model", "bucket/impl/gradients.ipp",
        "if (parameters_[i].can_release_grad() && holds(i)) {",
        "if (parameters_[i].can_release_grad()) {",
        "participant/without_pass.test.cpp", "gradients that lie in buckets*",
    ),
    Mutation(
        "failed-batches-are-stepped", "bucket/without_pass.hpp",
        "return !is_untouched() && !is_like_pass();", "return has_joined && !is_untouched();",
        "participant/without_pass.test.cpp", "a batch that failed*",
    ),
    Mutation(
        "ranks-that-send-what-they-accumulated-say-nothing", "bucket/detail/impl/iteration.ipp",
        "} else if (!without_ || without_->is_like_pass()) {", "} else if (!without_) {",
        "participant/without_pass.test.cpp", "replicas with momentum*",
    ),
    Mutation(
        "joined-gradients-count-again-in-zero", "participant/sharded/zero_redundancy_optimizer.hpp",
        "if (!std::exchange(is_clear_, true)) { // what was sent or dropped", "if (false) {",
        "participant/without_pass.test.cpp", "what a joined rank held*",
    ),
    Mutation(
        "dropped-gradients-count-again", "participant/sharded/detail/gradients_for_owners.hpp",
        "has_joined_ && !std::exchange(is_clear_, true);", "false;",
        "participant/without_pass.test.cpp", "what a joined rank held*",
    ),
    Mutation(
        "failed-guards-leave-averages", "participant/gradient_participant.hpp",
        "~Hook() { passes_.end_guard(); }", "~Hook() { passes_.reducer_->forget_words(); }",
        "participant/without_pass.test.cpp", "averages do not stay*",
    ),
    Mutation(
        "failed-guards-leave-averages-in-sharded-models", "participant/gradient_participant.hpp",
        "~Hook() { passes_.end_guard(); }", "~Hook() {}",
        "participant/sharded_data_parallel.test.cpp", "averages do not stay in sharded*",
    ),
    Mutation(
        "failed-guards-leave-averages-of-captured-steps", "participant/captured/captured_step.hpp",
        "            step_.end_guard();\n", "",
        "communicator/nccl/captured_step.test.cpp", "averages of shadowed rounds*",
    ),
    Mutation(
        "zeros-are-scaled", "bucket/reducer.hpp",
        "factor_ = 1.0; // of zeros", "",
        "participant/without_pass.test.cpp", "a reduction is given*",
    ),
    Mutation(
        "iterations-go-on-without-a-bucket", "bucket/reducer.hpp",
        "has_failed_start_ = true; // unless this returns", "",
        "participant/without_pass.test.cpp", "a bucket whose collective*",
    ),
    Mutation(
        "skip-ends-an-evaluation-that-is-over", "participant/gradient_participant.hpp",
        "if (stage_ == Stage::failed && !is_last_evaluation_open(session)) {", "if (false) {",
        "participant/without_pass.test.cpp", "skip() after an evaluation*",
    ),
    Mutation(
        "loops-that-announced-a-window-hide-it", "join/detail/impl/rounds.ipp",
        "announced_ = own && code.syncs ? window_ : Window{};", "",
        "participant/window.test.cpp", "gradients that are cleared after a loop*",
    ),
    Mutation(
        "ranks-without-inputs-do-not-look", "join/detail/impl/session.ipp",
        "    hooks.forget_cleared();\n", "",
        "participant/window.test.cpp", "a rank without inputs that clears*",
    ),
    Mutation(
        "skips-before-a-pass-end-the-look", "participant/gradient_participant.hpp",
        "if (has_begun && round_.phase()", "if (round_.phase()",
        "participant/window.test.cpp", "a rank without inputs that clears*",
    ),
    Mutation(
        "the-second-model-keeps-its-marks", "join/joinable.hpp",
        "bool may_be_cleared() const noexcept { return state_.may_be_cleared_; }",
        "bool may_be_cleared() const noexcept { return state_.may_be_cleared_ && window().is_open(); }",
        "participant/window.test.cpp", "both models of a guard*",
    ),
    Mutation(
        "skipped-evaluations-have-weights", "join/detail/impl/rounds.ipp",
        "notice.skips && notice.phase == Phase::train &&", "notice.skips &&",
        "participant/window.test.cpp", "with an open window of weights*",
    ),
    Mutation(
        "skips-in-disabled-guards-open-a-round", "join/joinable.hpp",
        ": state.local_rounds_ != nullptr ? state.local_rounds_->announced_round(state.position_)", ": false ? nullptr",
        "participant/window.test.cpp", "a batch that a loop announced*",
    ),
    Mutation(
        "steps-in-disabled-guards-open-rounds", "join/detail/local_rounds.hpp",
        "bool const opens = !opened_ || (!loop_opens_rounds_ && is_next);",
        "bool const opens = !loop_opens_rounds_;",
        "participant/window.test.cpp", "a step hears of the window*",
    ),
    Mutation(
        "steps-in-disabled-guards-run-in-any-round", "join/detail/turn_order.hpp",
        "if (!takes_part(position, round)) {", "if (false) {",
        "join/failure.test.cpp", "a participant that takes no part*",
    ),
    Mutation(
        "a-skip-with-a-weight-of-0-has-no-period", "join/options.hpp",
        "notice.skips && options.weight_per_input ? notice.weight : OptionalCount{};", "OptionalCount{};",
        "participant/window.test.cpp", "a skip that gives the weight 0*",
    ),
    Mutation(
        "a-skip-with-a-weight-of-0-always-has-the-period", "join/options.hpp",
        "notice.skips && options.weight_per_input ?", "notice.skips ?",
        "participant/window.test.cpp", "a skip that gives the weight 0*",
    ),
    Mutation(
        "a-pass-in-a-skipped-round-is-lost", "participant/gradient_participant.hpp",
        "            require_no_skip(notice);\n", "",
        "participant/window.test.cpp", "a model runs no pass*",
    ),
    Mutation(
        "zeros-of-one-model-are-cleared", "join/detail/impl/entry.ipp",
        "if (is_zeros && !has_numbers) {", "if (is_zeros) {",
        "participant/window.test.cpp", "zeros of one model*",
    ),
    Mutation(
        "zeros-of-one-model-are-looked-at-again", "join/detail/impl/entry.ipp",
        ".begin_guard(is_zeros);", ".begin_guard(false);",
        "participant/window.test.cpp", "zeros of one model*",
    ),
    Mutation(
        "hooks-of-those-that-live-are-lost", "join/detail/impl/guard.ipp",
        "entrant->has_hook && entrant->attachment.is_attached();", "false;",
        "participant/without_pass.test.cpp", "a model that outlives*",
    ),
    Mutation(
        "hooks-of-destroyed-participants-run-their-destructors", "join/detail/impl/guard.ipp",
        "entrant->has_hook && entrant->attachment.is_attached();", "true;",
        "join/failure.test.cpp", "the hook of a participant*",
    ),
    Mutation(
        "loops-of-disabled-guards-count-no-window", "join/detail/local_rounds.hpp",
        "window_.pass(false, notice, own);", "window_.pass(false, notice.phase);",
        "participant/window.test.cpp", "an optimizer that averages alone counts*",
    ),
    Mutation(
        "windows-of-disabled-guards-end-with-them", "join/detail/impl/attachments.ipp",
        "state->window_ = state->local_rounds_->window();", "state->window_ = {};",
        "participant/window.test.cpp", "an optimizer that averages alone counts*",
    ),
    Mutation(
        "later-models-cannot-skip", "join/detail/session.hpp",
        "(loop_opens_rounds() || (is_answered() && turns_.next() == position));", "loop_opens_rounds();",
        "participant/window.test.cpp", "a second model skips*",
    ),
    Mutation(
        "settings-stay-those-of-the-last-step", "participant/sharded/optimizer.hpp",
        "if (static_cast<int>(result.last_joiners.size()) != comm_.size()) {", "if (false) {",
        "participant/zero_redundancy_optimizer.test.cpp", "*for the next step*",
    ),
    Mutation(
        "joined-ranks-without-a-step-differ", "participant/gradient_participant.hpp",
        "all || !round.is_shadow()}", "true}",
        "participant/verify_replicas.test.cpp", "a joined rank's values*",
    ),
    Mutation(
        "stepped-joined-ranks-say-nothing", "join/detail/entrant.hpp",
        "info.steps = std::is_same_v<Label, labels::step> || ", "info.steps = ",
        "participant/verify_replicas.test.cpp", "a joined rank's values*",
    ),
    Mutation(
        "replicas-are-compared-late", "participant/detail/model_checks.hpp",
        "if ((rounds_ + 1) % interval_ == 0) {", "if (rounds_ % interval_ == 0) {",
        "participant/verify_replicas.test.cpp", "all ranks hear which one*",
    ),
    Mutation(
        "ends-of-guards-compare-all-ranks", "participant/gradient_participant.hpp",
        "detail::is_last_joiner(result, comm_.rank())}", "true}",
        "participant/verify_replicas.test.cpp", "where a guard ends*",
    ),
]


class Failure(Exception):
    """Says why a mutation proves nothing."""


def mutated(mutation, root=ROOT):
    """The text of its header with the mutation."""
    text = (root / "include/joinable" / mutation.header).read_text(encoding="utf-8")
    count = text.count(mutation.old)
    if count != 1:
        raise Failure(f"{mutation.header} has its text {count} times, not once: {mutation.old}")
    return text.replace(mutation.old, mutation.new)


def check_cases(mutation, root=ROOT):
    """A part of a filter that names no test is an error. Commas part it, also those of a name: write * for them."""
    texts = [(root / "tests/joinable" / test).read_text(encoding="utf-8") for test in mutation.tests.split()]
    if not all("TEST_CASE" in text for text in texts):
        return  # a program or a misuse, which runs as it is
    names = [
        "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals))
        for text in texts for literals in re.findall(r'TEST_CASE\w*\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', text)
    ]
    for part in mutation.cases.split(","):
        pattern = re.escape(part).replace(r"\*", ".*").replace(r"\?", ".")
        if not any(re.fullmatch(pattern, name, re.IGNORECASE) for name in names):
            raise Failure(f"no test of {mutation.tests} is called {part}")


class Workshop:
    """A copy of the headers and the tests, which nobody edits meanwhile."""

    def __init__(self, folder, compiler):
        self.folder = folder
        self.compiler = compiler
        for name in ("include", "tests"):
            shutil.copytree(ROOT / name, folder / name)
        self.lock = threading.Lock()
        self.main = folder / "main.o"
        self.compile(["-c", folder / "tests/support/main.cpp", "-o", self.main])

    def compiled(self, arguments, first=()):
        """How the compiler ended. `first` are folders of headers that come before the library's."""
        folders = [*first, self.folder / "include", self.folder / "tests",
                   self.folder / "tests/support/rank_kinds/threads", CUDA, TORCH]
        command = [self.compiler, "-std=c++20", "-O0", "-w", *(f"-I{path}" for path in folders), *arguments]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )

    def compile(self, arguments, first=()):
        result = self.compiled(arguments, first)
        if result.returncode != 0:
            raise Failure("does not compile:\n" + "\n".join(result.stdout.splitlines()[:10]))

    def fakes(self):
        """The fake CUDA and NCCL libraries, compiled when the first test needs them."""
        programs = []
        for name in ("fake_cuda", "fake_nccl"):
            unit = self.folder / f"{name}.cpp"
            programs.append(unit.with_suffix(".o"))
            with self.lock:
                if not unit.exists():
                    sources = sorted((self.folder / "tests/support" / name).glob("*.cpp"))
                    unit.write_text("".join(f'#include "{one}"\n' for one in sources), encoding="utf-8")
                    self.compile(["-c", unit, "-o", programs[-1]])
        return programs

    def why_it_is_not_refused(self, misuse, headers, first):
        """Empty where the compiler says what the misuse expects. Its headers alone have to compile."""
        text = misuse.read_text(encoding="utf-8")
        headers.write_text("\n".join(re.findall(r"#include .*", text)) + "\n", encoding="utf-8")
        self.compile(["-fsyntax-only", headers], first)
        result = self.compiled(["-fsyntax-only", misuse], first)
        if result.returncode == 0:
            return "compiles"
        expected = re.findall(r"// EXPECT: (.*)", text)
        return "; ".join(f"does not say: {one}" for one in expected if one not in result.stdout)

    def run(self, test, filters, first=()):
        """Why the test fails, for each of the filters; empty where it passes."""
        with tempfile.TemporaryDirectory(dir=self.folder) as here:
            program = pathlib.Path(here) / "test"
            source = self.folder / "tests/joinable" / test
            if test.startswith("../fail/"):
                headers = pathlib.Path(here) / "headers.cpp"
                return [self.why_it_is_not_refused(source, headers, first) for _ in filters]
            text = source.read_text(encoding="utf-8")
            objects = [] if "\nint main(" in text else [self.main]
            objects += self.fakes() if re.search("<support/(fake_|nccl_)", text) else []
            libraries = [f"-l{name}" for name in ("rapidcheck", "gloo") if f"{name}.h" in text]
            libraries += ["-ltorch", "-ltorch_cpu", "-lc10"] if test.startswith("interop/torch") else []
            self.compile([source, *objects, "-pthread", *libraries, "-o", program], first)
            return [why_it_fails(program, cases).replace(f"{self.folder}/", "") for cases in filters]


def why_it_fails(program, cases):
    with subprocess.Popen(
        [program, f"--test-case={cases}", "--no-intro", "--no-colors", "--abort-after=1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            process.communicate()
            return f"has not ended after {LIMIT} s"
    if "no test case passes the filters" in output:
        raise Failure(f"no test case is called {cases}")
    if process.returncode != 0:
        lines = [line for line in output.splitlines() if "ERROR" in line or line.startswith("TEST CASE")]
        return "; ".join(line.strip() for line in lines[:2]) or f"ended with {process.returncode}"
    return ""


def judge(workshop, mutation):
    """(verdict, details): the details are why its first test fails."""
    try:
        text = mutated(mutation, workshop.folder)
        with tempfile.TemporaryDirectory(dir=workshop.folder) as first:
            header = pathlib.Path(first) / "joinable" / mutation.header
            header.parent.mkdir(parents=True)
            header.write_text(text, encoding="utf-8")
            for test in mutation.tests.split():
                if why := workshop.run(test, [mutation.cases], [first])[0]:
                    return "killed", why
        return "SURVIVED", f"{mutation.tests} {mutation.cases} pass all the same"
    except Failure as failure:
        return "ERROR", str(failure)


def judge_unmutated(workshop, test, filters):
    try:
        failures = [f"{cases}: {why}" for cases, why in zip(filters, workshop.run(test, filters)) if why]
        return ("ERROR", "fails without a mutation: " + "; ".join(failures)) if failures else ("passes", "")
    except Failure as failure:
        return "ERROR", str(failure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these; all of them by default")
    parser.add_argument("--list", action="store_true", help="print names, headers and tests, and check that they exist")
    parser.add_argument("--compiler", default="clang++-19" if shutil.which("clang++-19") else "c++")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := set(options.names) - set(known):
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in options.names] or MUTATIONS

    verdicts = []

    def report(name, verdict, details):
        verdicts.append(verdict)
        print(f"{verdict:9}{name}: {details}" if details else f"{verdict:9}{name}", flush=True)

    if options.list:
        for mutation in chosen:
            try:
                mutated(mutation)
                check_cases(mutation)
                print(f"{mutation.name}: {mutation.header} against {mutation.tests} {mutation.cases}")
            except Failure as failure:
                report(mutation.name, "ERROR", str(failure))
        sys.exit(1 if verdicts else 0)

    with tempfile.TemporaryDirectory(prefix="mutate") as folder, \
            concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        workshop = Workshop(pathlib.Path(folder), options.compiler)
        filters = {}
        for mutation in chosen:
            for test in mutation.tests.split():
                filters.setdefault(test, set()).add(mutation.cases)
        unmutated = pool.map(lambda one: judge_unmutated(workshop, one[0], sorted(one[1])), filters.items())
        for test, result in zip(filters, unmutated):
            report(test, *result)
        if "ERROR" not in verdicts:
            for mutation, result in zip(chosen, pool.map(lambda one: judge(workshop, one), chosen)):
                report(mutation.name, *result)
    killed = verdicts.count("killed")
    survived = verdicts.count("SURVIVED")
    errors = verdicts.count("ERROR")
    print(f"{killed} of {len(chosen)} mutations killed, {survived} survived, {errors} errors")
    sys.exit(1 if survived or errors else 0)


if __name__ == "__main__":
    main()
