"""What a coordinator that works with recipients of blind mixtures, or keeps to no protocol, computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from medsilo.privacy.secure_aggregation import blind_mixing, ring
from medsilo.privacy.secure_aggregation.blind_mixing import FRACTION_BITS, SPREAD_BITS
from medsilo.privacy.secure_aggregation.ring import DEGREE, Words
from tests.support.runs.blind_attempt import Attempt

PRIMES = (2**61 - 1, 2**31 - 1)
Vector = list[int]


def whole(words: Words) -> Vector:
    """Numbers ``[2, n]`` as whole numbers next to 0."""
    inverse = pow(PRIMES[0], -1, PRIMES[1])
    found = []
    for long, short in words.T.tolist():
        number = long + PRIMES[0] * ((short - long) * inverse % PRIMES[1])
        found.append(number - ring.Q if number > ring.Q // 2 else number)
    return found


def bare(attempt: Attempt, sealed: Words, secret: Words) -> Vector:
    """The first polynomial of what a known secret opens: models and errors."""
    product = ring.Factor(secret).times(ring.public_polynomials(attempt.context, 0, 1))[:, 0]
    return whole(ring.subtract(sealed[:, :DEGREE], product))


def errors_of(attempt: Attempt, name: str) -> Vector:
    """The truth: what was added to a hospital's first numbers."""
    opened = bare(attempt, attempt.sealed[name], attempt.silos[name]._secret)
    return [a - b for a, b in zip(opened, _spread(attempt.models[name][:DEGREE]), strict=False)]


def errors_by_kernel(attempt: Attempt, recipients: Sequence[str], count: int) -> tuple[list[Vector], float]:
    """What a coordinator and these recipients take the others' errors for, ``[honest][count]``, though it is given the
    models, which it does not have; and the length of the last of the kernel's reduced vectors, which decides.

    Each mixture is a sum of models and errors in whole numbers. What the recipients' rows leave open is a vector of
    their kernel, a lattice: the nearest one to nothing is taken (Babai, 1986), which is right where errors are narrow
    beside its reduced vectors.
    """
    honest = [name for name in attempt.names if name not in recipients]
    places = [attempt.names.index(name) for name in honest]
    mixed = []
    for name in recipients:
        silo = attempt.silos[name]
        opened = bare(attempt, attempt.mixed[name], silo._unmasked(attempt.mix, attempt.opener(name).share))[:count]
        for own in recipients:  # their own parts, which they know
            part = bare(attempt, attempt.sealed[own], attempt.silos[own]._secret)[:count]
            opened = [a - attempt.mix.weight(name, own) * b for a, b in zip(opened, part, strict=True)]
        for other in honest:
            model = _spread(attempt.models[other][:count])
            opened = [a - attempt.mix.weight(name, other) * b for a, b in zip(opened, model, strict=True)]
        mixed.append(opened)
    rows = [[int(w) for w in attempt.weights[attempt.names.index(name), places]] for name in recipients]
    kernel, rest = _kernel(rows)
    images = [[_dot(row, vector) for vector in rest] for row in rows]
    orthogonal = _orthogonal(kernel)
    found = []
    for place in range(count):
        parts = _solved(images, [row[place] for row in mixed])
        vector = [sum(p * v[i] for p, v in zip(parts, rest, strict=True)) for i in range(len(honest))]
        for basis, direction in zip(reversed(kernel), reversed(orthogonal), strict=True):
            times = round(float(np.dot(np.array(vector, dtype=float), direction) / np.dot(direction, direction)))
            vector = [a - times * b for a, b in zip(vector, basis, strict=True)]
        found.append(vector)
    shortest = min(float(np.linalg.norm(direction)) for direction in orthogonal)
    return [list(column) for column in zip(*found, strict=True)], shortest


def changing(attempt: Attempt, number: int, by: float) -> Words:
    """By what the share that opens a mixture is to be changed so that one number of its first polynomial changes by
    that much: the quotient of the two polynomials, modulo both primes."""
    public = ring.public_polynomials(attempt.context, 0, 1)[:, 0]
    unit = round(by * (1 << FRACTION_BITS)) << (SPREAD_BITS + blind_mixing.WEIGHT_BITS)
    wanted = [unit if place == number else 0 for place in range(DEGREE)]
    return np.array(
        [_quotient(wanted, row.tolist(), p) for row, p in zip(public, PRIMES, strict=True)], dtype=np.uint64
    )


def _spread(model: NDArray[np.float32]) -> Vector:
    return [int(n) << SPREAD_BITS for n in np.rint(model.astype(np.float64) * (1 << FRACTION_BITS))]


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _kernel(rows: list[Vector]) -> tuple[list[Vector], list[Vector]]:
    """A reduced basis of the whole vectors that all rows send to 0, and what completes it to one of all vectors."""
    count, large = len(rows[0]), 1 << 90
    basis = [[int(i == j) for i in range(count)] + [large * row[j] for row in rows] for j in range(count)]
    reduced = _reduced(basis)
    inside = count - int(np.linalg.matrix_rank(np.array(rows, dtype=float)))
    return [vector[:count] for vector in reduced[:inside]], [vector[:count] for vector in reduced[inside:]]


def _reduced(basis: list[Vector]) -> list[Vector]:
    """Lenstra, Lenstra and Lovász (1982) in whole numbers alone (Cohen, "A Course in Computational Algebraic Number
    Theory", Algorithm 2.6.7)."""
    basis = [list(vector) for vector in basis]
    count = len(basis)
    minors, parts = [1] + [0] * count, [[0] * count for _ in range(count)]

    def orthogonalise(k: int) -> None:
        for j in range(k + 1):
            u = _dot(basis[k], basis[j])
            for i in range(j):
                u = (minors[i + 1] * u - parts[k][i] * parts[j][i]) // minors[i]
            if j < k:
                parts[k][j] = u
            else:
                minors[k + 1] = u

    def shorten(k: int, j: int) -> None:
        if 2 * abs(parts[k][j]) <= minors[j + 1]:
            return
        times = (2 * parts[k][j] + minors[j + 1]) // (2 * minors[j + 1])
        basis[k] = [a - times * b for a, b in zip(basis[k], basis[j], strict=True)]
        parts[k][j] -= times * minors[j + 1]
        for i in range(j):
            parts[k][i] -= times * parts[j][i]

    orthogonalise(0)
    k, known = 1, 0
    while k < count:
        if k > known:
            known = k
            orthogonalise(k)
        shorten(k, k - 1)
        if 4 * (minors[k + 1] * minors[k - 1] + parts[k][k - 1] ** 2) < 3 * minors[k] ** 2:
            basis[k], basis[k - 1] = basis[k - 1], basis[k]
            for j in range(k - 1):
                parts[k][j], parts[k - 1][j] = parts[k - 1][j], parts[k][j]
            part = parts[k][k - 1]
            minor = (minors[k - 1] * minors[k + 1] + part**2) // minors[k]
            for i in range(k + 1, known + 1):
                before = parts[i][k]
                parts[i][k] = (minors[k + 1] * parts[i][k - 1] - part * before) // minors[k]
                parts[i][k - 1] = (minor * before + part * parts[i][k]) // minors[k + 1]
            minors[k] = minor
            k = max(1, k - 1)
        else:
            for j in range(k - 2, -1, -1):
                shorten(k, j)
            k += 1
    return basis


def _orthogonal(basis: list[Vector]) -> list[NDArray[np.float64]]:
    found: list[NDArray[np.float64]] = []
    for vector in basis:
        left = np.array(vector, dtype=np.float64)
        for direction in found:
            left -= np.dot(left, direction) / np.dot(direction, direction) * direction
        found.append(left)
    return found


def _solved(matrix: list[Vector], values: Vector) -> Vector:
    """x of matrix·x = values, all whole (Cramer's rule, by Bareiss's elimination)."""
    size = len(matrix)
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    before = 1
    for k in range(size):
        pivot = next(i for i in range(k, size) if rows[i][k])
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(size):
            if i != k:
                head = rows[i][k]
                rows[i] = [(rows[k][k] * a - head * b) // before for a, b in zip(rows[i], rows[k], strict=True)]
        before = rows[k][k]
    assert all(row[-1] % before == 0 for row in rows)
    return [row[-1] // before for row in rows]


def _quotient(wanted: Vector, by: Vector, prime: int) -> Vector:
    """Modulo X^n + 1 and a prime 2^k - 1, by the values at all roots, which are numbers a + b·i modulo the prime."""
    root = _root(2 * DEGREE, prime)
    over, under = (_values([(n, 0) for n in numbers], root, prime) for numbers in (wanted, by))
    ratios = [_times(a, _inverse(b, prime), prime) for a, b in zip(over, under, strict=True)]
    # The same transform back: with the inverse root, over the number of roots, and untwisted.
    back = _transformed(ratios, _power(_inverse(root, prime), 2, prime), prime)
    found, twist, scale = [], (pow(DEGREE, -1, prime), 0), _inverse(root, prime)
    for number in back:
        real, imaginary = _times(number, twist, prime)
        assert imaginary == 0
        found.append(real)
        twist = _times(twist, scale, prime)
    return found


Pair = tuple[int, int]


def _values(numbers: list[Pair], root: Pair, prime: int) -> list[Pair]:
    twisted, twist = [], (1, 0)
    for number in numbers:
        twisted.append(_times(number, twist, prime))
        twist = _times(twist, root, prime)
    return _transformed(twisted, _power(root, 2, prime), prime)


def _transformed(numbers: list[Pair], root: Pair, prime: int) -> list[Pair]:
    if len(numbers) == 1:
        return numbers
    square = _times(root, root, prime)
    even, odd = _transformed(numbers[::2], square, prime), _transformed(numbers[1::2], square, prime)
    found, power = list(even) + list(even), (1, 0)
    for place, (one, other) in enumerate(zip(even, odd, strict=True)):
        real, imaginary = _times(other, power, prime)
        found[place] = ((one[0] + real) % prime, (one[1] + imaginary) % prime)
        found[place + len(even)] = ((one[0] - real) % prime, (one[1] - imaginary) % prime)
        power = _times(power, root, prime)
    return found


def _root(order: int, prime: int) -> Pair:
    """Of 1, of this order, a power of 2."""
    for real in range(2, 100):
        found = _power((real, 1), (prime * prime - 1) // order, prime)
        if _power(found, order // 2, prime) == (prime - 1, 0):
            return found
    raise AssertionError


def _times(one: Pair, other: Pair, prime: int) -> Pair:
    return (one[0] * other[0] - one[1] * other[1]) % prime, (one[0] * other[1] + one[1] * other[0]) % prime


def _power(number: Pair, exponent: int, prime: int) -> Pair:
    found = (1, 0)
    while exponent:
        if exponent & 1:
            found = _times(found, number, prime)
        number = _times(number, number, prime)
        exponent >>= 1
    return found


def _inverse(number: Pair, prime: int) -> Pair:
    scale = pow(number[0] * number[0] + number[1] * number[1], -1, prime)
    return number[0] * scale % prime, -number[1] * scale % prime
