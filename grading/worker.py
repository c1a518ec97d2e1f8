"""What a worker process runs: comparisons by sympy and math-verify, until the parent is gone.

A completion is text that an optimiser wrote: it may ask for 10^(10^8), and no signal or thread stops the C code
that then runs. The kernel ends this process where nothing else does.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

_CPU_SECONDS = 2  # for one comparison; in CPU time, so that a reward does not depend on how busy the machine is
_LIBRARY_SECONDS = 10  # math-verify's own limit, in wall time; a fraction of a second would make it fail silently
_MEMORY_BYTES = 1 << 30
_DIGITS = 100  # to which two numbers agree that sympy cannot prove equal


def _parse(latex: str) -> Any:
    if r"\pm" in latex and "," not in latex:  # which math-verify does not read inside a fraction
        latex = latex.replace(r"\pm", "+") + "," + latex.replace(r"\pm", "-")
    config = LatexExtractionConfig(boxed_match_priority=-1)
    return parse(f"${latex}$", [config], "no_fallback", parsing_timeout=_LIBRARY_SECONDS, raise_on_error=True)


def _same_number(answer: str, reference: str) -> bool:
    values = []
    for parsed in (_parse(reference)[0], _parse(answer)[0]):
        exact = parsed.xreplace({number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)})
        values.append(
            exact.xreplace({symbol: sympy.I for symbol in exact.free_symbols if symbol.name == "i"}).doit()
        )
    gold, said = values
    if gold == said or (gold.is_Rational and said.is_Rational):
        return gold == said
    gold, said = gold.evalf(_DIGITS + 30), said.evalf(_DIGITS + 30)
    return bool(abs(gold - said) <= abs(gold) * sympy.Float(10) ** -_DIGITS)


def _solutions(parsed: Any) -> sympy.Set:
    """The set that an interval or inequalities in one unknown describe; several make a union."""
    if isinstance(parsed, sympy.FiniteSet):
        return sympy.Union(*map(_solutions, parsed.args))
    return parsed if isinstance(parsed, sympy.Set) else parsed.as_set()


def _same_expression(answer: str, reference: str) -> bool:
    gold, said = _parse(reference), _parse(answer)
    # 12 decimals: at the library's 6, 0.333333 is 1/3.
    options: dict[str, Any] = {"float_rounding": 12, "allow_set_relation_comp": True, "raise_on_error": True}
    if verify(gold, said, timeout_seconds=_LIBRARY_SECONDS, **options):
        return True
    with suppress(AttributeError, NotImplementedError, TypeError, ValueError):  # no inequalities
        return _solutions(gold[0]) == _solutions(said[0])
    return False


def _same_to_the_chapter(answer: str, reference: str) -> bool:
    gold, said = (
        parse(text, parsing_timeout=_LIBRARY_SECONDS) for text in (f"${reference}$", rf"\boxed{{{answer}}}")
    )
    return verify(gold, said, timeout_seconds=_LIBRARY_SECONDS)


_RULES = {"number": _same_number, "expression": _same_expression, "chapter": _same_to_the_chapter}


def _out_of_time(*_: object) -> NoReturn:
    raise TimeoutException


def _verdict(answer: str, reference: str, rule: str) -> str:
    # What C code does not hear, the kernel ends, even if the parent has died meanwhile.
    used = resource.getrusage(resource.RUSAGE_SELF)
    last_second = int(used.ru_utime + used.ru_stime) + _CPU_SECONDS + 1
    resource.setrlimit(resource.RLIMIT_CPU, (last_second, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    try:
        return "correct" if _RULES[rule](answer, reference) else "wrong"
    except TimeoutException:  # a BaseException
        return "timeout"
    except MemoryError:
        return "crash"
    except Exception:  # sympy raises all kinds on what it cannot read or compare, and the verdict says so
        return "unparsed"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(connection: Connection, parent: int) -> None:
    """Compare what comes over the pipe; return when `parent`, a process id, is this one's parent no more."""
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _out_of_time)
    with suppress(TimeoutException):
        _same_expression(r"\sqrt{8}", r"2\sqrt{2}")  # the first time builds tables
    # A parent that is gone closes the pipe, unless an engine that it forked holds the other end open too.
    with suppress(EOFError, ConnectionError):
        connection.send(True)
        while True:
            while not connection.poll(1):
                if os.getppid() != parent:
                    return
            connection.send(_verdict(*connection.recv()))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
