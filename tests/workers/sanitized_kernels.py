"""The tests of few_rows.cpp, built with AddressSanitizer and UndefinedBehaviorSanitizer, for a process that has
libasan preloaded: python sanitized_kernels.py [TEXT OTHER]

An error ends the process. TEXT in the source, if given, becomes OTHER: a kernel broken on purpose.
"""

import sys
from unittest.mock import patch

import pytest
from torch._inductor.codecache import CppCodeCache

from tests.support.paths import ROOT

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1")
HEADER = (ROOT / "tests" / "support" / "seen_by_sanitizer.h").read_text()
FILES = [f"{ROOT}/tests/decoding/{name}.py" for name in ("test_few_rows", "test_few_queries")]
build = CppCodeCache.load_async


def replaced(source: str, old: str, new: str) -> str:
    if old not in source:
        sys.exit(f"the source has no {old!r}")
    return source.replace(old, new)


def sanitized(source: str, **options: object) -> object:
    for instruction, memory in (("tileloadd", "from"), ("tilestored", "to")):
        text = f'asm volatile("{instruction}'
        source = replaced(source, text, f"see_tile({memory}, stride);\n  {text}")
    if sys.argv[1:]:
        source = replaced(source, *sys.argv[1:])
    return build(HEADER + source, extra_flags=FLAGS, **options)


with patch.object(CppCodeCache, "load_async", sanitized):
    sys.exit(pytest.main(["-q", "-x", "-s", "-n0", "-p", "no:cacheprovider", *FILES]))
