#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""What a plain TCP connection gets from a link: probe.py serve|measure ADDRESS BYTES, each on its machine.

The second prints "<median round trip of one byte in microseconds> <megabytes per second>".
"""
import socket
import statistics
import sys
import time

PORT = 5555
ROUND_TRIPS = 100
DEADLINE = 60  # seconds


def serve(address, size):
    with socket.create_server((address, PORT)) as server:
        server.settimeout(DEADLINE)
        connection = server.accept()[0]
    with connection:
        connection.settimeout(DEADLINE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            connection.sendall(connection.recv(1))
        left = size
        buffer = bytearray(1 << 20)
        while left > 0:
            count = connection.recv_into(buffer)
            if count == 0:
                sys.exit("the other side has gone")
            left -= count
        connection.sendall(b"x")


def connect(address):
    for _ in range(DEADLINE * 20):
        try:
            return socket.create_connection((address, PORT), DEADLINE)
        except ConnectionRefusedError:  # it has not started yet
            time.sleep(0.05)
    sys.exit(f"nobody serves at {address}")


def measure(address, size):
    with connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        connection.sendall(bytes(size))
        connection.recv(1)
        seconds = time.perf_counter() - start
    print(f"{statistics.median(times) * 1e6:.0f} {size / 1e6 / seconds:.0f}", flush=True)


if __name__ == "__main__":
    {"serve": serve, "measure": measure}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
