# SPDX-License-Identifier: Apache-2.0
# The commands of the README, over the presets of CMakePresets.json.

PREFIX ?= /usr/local
DESTDIR ?=
FUZZ_SECONDS ?= 60
PROPERTY_BATCHES ?= 20000
JOBS ?= $(shell nproc)
CTEST_FLAGS ?=

.PHONY: build demo check check-python install asan tsan fuzz coverage property tidy format clean

# The library and the tool, at build/release/evenkv.
build:
	@scripts/install-deps build
	cmake --preset release
	cmake --build --preset release --parallel $(JOBS) --target libevenkv.so libevenkv_python.so evenkv_tool

# What the planners do with batches drawn from a real trace, executed and checked on this CPU.
demo: build
	build/release/evenkv demo

# Every test.
check:
	@scripts/install-deps check
	cmake --preset release
	cmake --build --preset release --parallel $(JOBS)
	ctest --preset release --parallel $(JOBS) $(CTEST_FLAGS)

# The Python package, installed as its users do into a virtual environment of its own, and every test of it.
PYTHON_VENV ?= build/python-venv
PYTEST_FLAGS ?=
PIP_FLAGS ?= -C cmake.define.EVENKV_CUDA=OFF
check-python:
	@scripts/install-deps check-python
	python3 -m venv $(PYTHON_VENV)
	$(PYTHON_VENV)/bin/pip install -q uv
	$(PYTHON_VENV)/bin/uv pip install -q --python $(PYTHON_VENV)/bin/python --reinstall-package evenkv $(PIP_FLAGS) \
	    '.[test]'
	$(PYTHON_VENV)/bin/pytest -p no:cacheprovider $(PYTEST_FLAGS) python/tests

install: build
	DESTDIR='$(DESTDIR)' cmake --install build/release --prefix '$(PREFIX)'

# The tests under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer.
asan tsan:
	@scripts/install-deps check
	cmake --preset $@
	cmake --build --preset $@ --parallel $(JOBS)
	ctest --preset $@ --parallel $(JOBS)

# Each fuzz target for FUZZ_SECONDS, from the corpus in fuzz/corpus.
fuzz:
	@scripts/install-deps fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz --parallel $(JOBS)
	scripts/fuzz build/fuzz $(FUZZ_SECONDS)

# Line coverage of the tests, by folder and file.
coverage:
	@scripts/install-deps check
	cmake --preset coverage
	cmake --build --preset coverage --parallel $(JOBS)
	find build/coverage -name '*.gcda' -delete
	ctest --preset coverage --parallel $(JOBS)
	scripts/coverage.py build/coverage

# The invariants of every planner over PROPERTY_BATCHES seeded random batches (make check: 2,000).
property:
	@scripts/install-deps check
	cmake --preset release
	cmake --build --preset release --parallel $(JOBS) --target test_plan_properties
	EKV_PROPERTY_BATCHES=$(PROPERTY_BATCHES) build/release/test_plan_properties

# clang-tidy, which also has to see the tests: configured by make check.
tidy:
	git ls-files 'src/*.c' 'tools/*.c' | grep -v ^src/cuda/ | xargs -P $(JOBS) -n 4 clang-tidy --quiet -p build/release

format:
	find include src tools tests fuzz examples -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | xargs clang-format -i

clean:
	rm -rf build
