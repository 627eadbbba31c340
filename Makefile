# Each target sets up what it needs: Rust, Python 3.10 or newer and a C compiler are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := .demo
CLI    := target/release/volup
# The GPU architectures that kernels are compiled for, and those that they have to compile for (none: only what tests run).
ARCHS         ?= sm_90
CHECKED_ARCHS ?= sm_80,sm_90,sm_100

.PHONY: help demo test test-rust test-build test-python lint lint-rust lint-python format docs wheel kernels kernels-check kernels-checked emulate bench gpu-bundle clean

help:
	@echo "make demo    upsample a real MRI 2x with a trained decoder; figures and a PNG"
	@echo "make test    all tests: Rust, Python against PyTorch, README examples"
	@echo "make lint    formatting, clippy, ruff, documentation"
	@echo "make kernels compile the GPU kernels, for ARCHS=sm_90 or a list such as sm_80,sm_90"
	@echo "make kernels-check  lint and test their build; compile them for all of CHECKED_ARCHS and run them"
	@echo "make emulate the whole suite of engines on the kernels' PTX, without a GPU: hours"
	@echo "make bench   volup beside PyTorch on this CPU"
	@echo "make gpu-bundle  what a GPU machine without Rust needs to test and time volup"
	@echo "make wheel   the Python package as a wheel in target/wheels"
	@echo "make docs    the Rust documentation in target/doc"

# --- Demo -----------------------------------------------------------------------------------------

demo: cli $(DEMO)/venv/ready
	$(DEMO)/venv/bin/python examples/superres/demo.py --volup $(CLI) --cache $(DEMO) --out $(DEMO)

$(DEMO)/venv/ready: examples/superres/requirements.txt
	$(PYTHON) -m venv $(DEMO)/venv
	$(DEMO)/venv/bin/pip install --quiet --requirement $<
	touch $@

.PHONY: cli
cli:
	cargo build --release --locked --package volup-cli

# --- Tests ----------------------------------------------------------------------------------------

test: test-rust test-python

test-rust:
	cargo test --workspace --locked

# What of it may go on beside other work.
test-build:
	cargo test --workspace --locked --no-run

# Python's tests take the command line and a wheel as Rust's tests are compiled: with the checks, and far sooner than a release.
TESTED := target/debug
test-python: $(VENV)/ready
	cargo test --workspace --locked --test commands --no-run
	rm -rf $(TESTED)/wheels
	$(BIN)/maturin build --quiet --locked --manifest-path python/Cargo.toml --out $(TESTED)/wheels
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(TESTED)/wheels/*.whl
	VOLUP_CLI=$(abspath $(TESTED)/volup) $(BIN)/python -m pytest python/tests --quiet

# A stale wheel would be installed beside the new one.
wheel: $(VENV)/ready
	rm -rf target/wheels
	$(BIN)/maturin build --quiet --release --locked --manifest-path python/Cargo.toml --out target/wheels

# The package name is the only thing that is taken from the network; PyTorch is by far the largest.
$(VENV)/ready: python/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement $<
	touch $@

# --- Lint and documentation -----------------------------------------------------------------------

lint: lint-rust lint-python

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(MAKE) --no-print-directory docs

lint-python: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd python && $(abspath $(BIN))/python -m mypy
	$(BIN)/python bench/readme_figures.py --check

format: $(VENV)/ready
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs:
	cargo doc --workspace --no-deps --locked --quiet

# --- GPU kernels ----------------------------------------------------------------------------------
# Neither a GPU nor a CUDA toolkit is needed: the compiler comes as wheels. What is up to date is not
# compiled again.

KERNELS       := crates/volup-kernels
TOOLCHAIN     := $(KERNELS)/toolchain
KERNELS_CARGO := --locked --manifest-path $(KERNELS)/Cargo.toml --target-dir target/kernels
KERNELS_TOOL  := $(TOOLCHAIN) target/kernels/debug/volup-kernels --variants $(KERNELS)/variants.toml

# What kernels are made from, what plans them and what runs them on the CPU, new files as well, as one hash; and that of those that were
# checked.
RECORD          := $(KERNELS)/checked
HASH_OF_KERNELS := git ls-files --cached --others --exclude-standard -- \
	$(KERNELS) crates/volup-ptx crates/volup-cuda/src crates/volup/src ':!$(RECORD)' \
	| LC_ALL=C sort | git hash-object --stdin-paths | git hash-object --stdin

kernels: target/kernels/debug/volup-kernels
	$(KERNELS_TOOL) --arch $(ARCHS) --out $(KERNELS)/cubins

.PHONY: target/kernels/debug/volup-kernels
target/kernels/debug/volup-kernels: .kernels-venv/ready
	$(TOOLCHAIN) cargo build $(KERNELS_CARGO)

.kernels-venv/ready: $(KERNELS)/requirements.txt
	$(PYTHON) -m venv .kernels-venv
	.kernels-venv/bin/pip install --quiet --requirement $<
	touch $@

kernels-check: target/kernels/debug/volup-kernels
	cargo fmt --manifest-path $(KERNELS)/Cargo.toml --check
	$(TOOLCHAIN) cargo test $(KERNELS_CARGO)
	$(TOOLCHAIN) cargo clippy $(KERNELS_CARGO) --all-targets -- -D warnings
	$(if $(CHECKED_ARCHS),$(KERNELS_TOOL) --arch $(CHECKED_ARCHS) --out target/kernels/check)
# What runs as PTX is for Hopper; what of it there is not yet is made for it.
	VOLUP_PTX=$(abspath target/kernels/check/sm_90) VOLUP_PTX_TOOL=$(abspath target/kernels/debug/volup-kernels) \
		$(if $(CHECKED_ARCHS),,VOLUP_PTX_FEW=1) $(TOOLCHAIN) cargo test --workspace --locked emulated
	$(HASH_OF_KERNELS) > $(RECORD)

# Whether `kernels-check` has passed with them as they are.
kernels-checked:
	test "$$($(HASH_OF_KERNELS))" = "$$(cat $(RECORD))"

emulate: kernels
	VOLUP_PTX=$(abspath $(KERNELS)/cubins/sm_90) cargo test --release --locked --package volup-cuda --lib emulated \
		-- --include-ignored

# --- Benchmarks -----------------------------------------------------------------------------------

bench: wheel
	$(BIN)/pip install --quiet --force-reinstall --no-deps target/wheels/*.whl
	$(BIN)/python bench/compare_torch.py
	$(BIN)/python bench/training.py

# There: python3 .gpu-bundle/gpu.py
gpu-bundle: kernels wheel cli
	$(BIN)/python bench/gpu_bundle.py

clean:
	cargo clean
	rm -rf $(VENV) $(DEMO) .gpu-bundle .kernels-venv $(KERNELS)/cubins
