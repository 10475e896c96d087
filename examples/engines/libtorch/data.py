#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Makes what the example trains on, the same bytes on every machine: data.py FOLDER writes

  digits.bin  5000 records: a byte with the digit, then 12 x 12 bytes of its image
  text.txt    2500 lines of 33 letters and spaces: sentences, cut anywhere

C++ and Python read both by torch::from_file and torch.from_file."""
import pathlib
import random
import sys

# Bits of a seven-segment display: top, middle, bottom, then left and right of the upper half, of the lower half.
SHOWN = [0x7D, 0x50, 0x37, 0x57, 0x5A, 0x4F, 0x6F, 0x51, 0x7F, 0x5F]
SIDE = 12  # pixels


def digit(draw):
    """A digit that is shifted and has noise."""
    image = [[draw() * 128 for _ in range(SIDE)] for _ in range(SIDE)]
    shown, y, x = int(draw() * 10), int(draw() * 4), int(draw() * 4)
    for segment in range(7):
        if SHOWN[shown] >> segment & 1:
            right, low = 4 * (segment in (4, 6)), 4 * (segment > 4)
            for i in range(5):
                row, column = (y + 4 * segment, x + i) if segment < 3 else (y + low + i, x + right)
                image[row][column] = min(255, image[row][column] + 100)
    return bytes([shown]) + bytes(int(pixel) for row in image for pixel in row)


def sentence(draw):
    words = "dog cat bird child teacher", "sees likes follows finds", "the a every no"
    noun, verb, article = (lambda kind=kind: kind.split()[int(draw() * len(kind.split()))] for kind in words)
    return f"{article()} {noun()} {verb()} {article()} {noun()} "


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1).random  # the same numbers in every version of Python
    (folder / "digits.bin").write_bytes(b"".join(digit(draw) for _ in range(5000)))
    text = ""
    while len(text) < 2500 * 33:
        text += sentence(draw)
    (folder / "text.txt").write_text("".join(text[i : i + 33] + "\n" for i in range(0, 2500 * 33, 33)))


if __name__ == "__main__":
    main()
