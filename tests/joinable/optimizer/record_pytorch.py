#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes recorded_by_pytorch.hpp: what PyTorch's optimizers make of 11 numbers in 3 and in 20 steps.

  python3 tests/joinable/optimizer/record_pytorch.py

By hand, where PyTorch is installed. Inputs are multiples of 1/8, so that they are the same everywhere.
"""
import itertools
import pathlib

import torch

COUNT = 11
STEPS = (3, 20)
ADAM = [
    {},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3},
    {"lr": 0.02, "weight_decay": 0.1},
    {"lr": 0.02, "amsgrad": True},
    {"lr": 0.02, "maximize": True},
    {"lr": 0.02, "betas": (0.4, 0.9), "weight_decay": 0.05, "amsgrad": True, "maximize": True},
]
SGD = [
    {},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "weight_decay": 0.25},
    {"lr": 0.1, "maximize": True},
    {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.25, "nesterov": True, "maximize": True},
]
NAMES = {"lr": "learning_rate", "eps": "epsilon"}
ORDER = [
    "learning_rate", "momentum", "beta1", "beta2", "dampening", "epsilon", "weight_decay", "amsgrad",
    "nesterov", "maximize",
]


def value(i):
    return (i % 7 - 3) / 4


def gradient(i, step):
    return ((5 * i + 3 * step) % 11 - 5) / 8


def number(x):
    return str(x).lower() if isinstance(x, bool) else repr(float(x))


def rule(name, settings):
    given = {NAMES.get(key, key): x for key, x in settings.items()}
    if "betas" in given:
        given["beta1"], given["beta2"] = given.pop("betas")
    return name + "{" + ", ".join(f".{key} = {number(given[key])}" for key in ORDER if key in given) + "}"


def train(optimizer, settings):
    parameter = torch.tensor([value(i) for i in range(COUNT)], dtype=torch.float64, requires_grad=True)
    stepper = optimizer([parameter], **settings)
    for step in range(1, max(STEPS) + 1):
        parameter.grad = torch.tensor([gradient(i, step) for i in range(COUNT)], dtype=torch.float64)
        stepper.step()
        if step in STEPS:
            yield parameter.detach().tolist()


lines = [
    "// SPDX-License-Identifier: BSL-1.0",
    f"// What PyTorch {torch.__version__.split('+')[0]} makes of {COUNT} numbers: written by record_pytorch.py.",
    "#pragma once",
    "",
    "#include <array>",
    "#include <variant>",
    "",
    "#include <joinable/optimizer/rules.hpp>",
    "",
    "namespace joinable_tests {",
    "",
    f"inline constexpr std::array<int, {len(STEPS)}> recorded_steps{{{', '.join(map(str, STEPS))}}};",
    "",
    "/// A rule, and the values after each of the recorded steps.",
    "struct RecordedTraining {",
    "    std::variant<joinable::Sgd, joinable::Adam, joinable::AdamW> rule;",
    f"    std::array<std::array<double, {COUNT}>, {len(STEPS)}> values;",
    "};",
    "",
    "// clang-format off",
    "inline constexpr RecordedTraining recorded_by_pytorch[] = {",
]
for name, settings in itertools.chain(
    (("Sgd", s) for s in SGD), (("Adam", s) for s in ADAM), (("AdamW", s) for s in ADAM)
):
    lines += [f"    {{joinable::{rule(name, settings)},", "     {{"]
    for values in train({"Sgd": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name], settings):
        lines += ["         {" + ", ".join(map(repr, values)) + "},"]
    lines += ["     }}},"]
lines += ["};", "// clang-format on", "", "} // namespace joinable_tests", ""]
pathlib.Path(__file__).with_name("recorded_by_pytorch.hpp").write_text("\n".join(lines))
