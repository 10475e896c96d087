#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""A link with delay and loss between two network namespaces, for kernels without netem.

relay.py SPACE SPACE DEVICE MILLISECONDS ONE_IN PROCESS makes a TUN device of this name in both namespaces, prints the
id of the process that carries packets from each to the other, and returns. A packet is written its delay after it was
read, in order; one in ONE_IN (0: none) is lost instead, drawn by a generator with a fixed seed. SIGUSR1 cuts the link:
all packets are lost. SIGUSR2 mends it. The carrier ends with PROCESS, or by SIGTERM. It takes the right to administer
networks.
"""
import collections
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PR_SET_TIMERSLACK = 29
MOST_BYTES = 1 << 16  # of a packet
MOST_PACKETS = 64  # read from one side before it is the other's turn

libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace):
    """This thread opens devices in the namespace from now on."""
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def open_device(name):
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


class Direction:
    """Packets from one device to the other, each with the time at which it is due."""

    def __init__(self, source, target, delay, one_in, seed):
        self.source, self.target = source, target
        self.delay, self.one_in = delay, one_in
        self.random = random.Random(seed)
        self.under_way = collections.deque()

    def take(self, is_cut):
        for _ in range(MOST_PACKETS):
            try:
                packet = os.read(self.source, MOST_BYTES)
            except BlockingIOError:
                return
            is_lost = self.one_in != 0 and self.random.randrange(self.one_in) == 0
            if not is_lost and not is_cut:
                self.under_way.append((time.monotonic() + self.delay, packet))

    def deliver(self, now):
        while self.under_way and self.under_way[0][0] <= now:
            try:
                os.write(self.target, self.under_way.popleft()[1])
            except OSError:
                pass  # a device that is down loses what comes

    def seconds_to_next(self, now):
        return max(0.0, self.under_way[0][0] - now) if self.under_way else None


def carry(devices, delay, one_in, process):
    is_cut = False

    def set_cut(number, _):
        nonlocal is_cut
        is_cut = number == signal.SIGUSR1

    signal.signal(signal.SIGUSR1, set_cut)
    signal.signal(signal.SIGUSR2, set_cut)
    libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else a wait may be 50 us too long
    directions = {
        devices[0]: Direction(devices[0], devices[1], delay, one_in, 1),
        devices[1]: Direction(devices[1], devices[0], delay, one_in, 2),
    }
    while True:
        now = time.monotonic()
        waits = [wait for one in directions.values() if (wait := one.seconds_to_next(now)) is not None]
        ready = select.select([*devices, process], [], [], min(waits, default=None))[0]
        if process in ready:
            return
        for source in ready:
            directions[source].take(is_cut)
        now = time.monotonic()
        for one in directions.values():
            one.deliver(now)


def main(space_a, space_b, name, milliseconds, one_in, process):
    process = os.pidfd_open(int(process))
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    devices = []
    for space in (space_a, space_b):
        with open(f"/run/netns/{space}", "rb") as namespace:
            enter(namespace.fileno())
        devices.append(open_device(name))
    enter(home)  # so that the carrier is none of the processes in the namespaces, which tests end
    os.close(home)
    carrier = os.fork()
    if carrier != 0:
        print(carrier)
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    carry(devices, float(milliseconds) / 1000, int(one_in), process)


if __name__ == "__main__":
    if len(sys.argv) != 7:
        sys.exit(__doc__)
    main(*sys.argv[1:])
