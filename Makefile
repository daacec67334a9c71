# emufpga: every command sets up what it needs in build/venv; nothing needs root.

PYTHON ?= python3
BUILD := build
VENV := $(BUILD)/venv
PY := $(VENV)/bin/python
BOARD ?= ulx3s_25f
MODEL ?= models/tiny-moe-q6k.gguf
SEEDS ?= 1,2,3
GPU ?= cuda

# For the tests; users may take any release in pyproject.toml's ranges.
TEST_TORCH := torch==2.13.0 transformers==5.24.0

.DEFAULT_GOAL := help
.PHONY: help sim sim-token sweep layer-cycles host-layer replay traces cache-replay cosim faults link-rate pipeline report screenshots suite capacity agents gpu-check hls4ml netlist boards program test lint check formal synth accuracy train mutants clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Settings: BOARD=$(BOARD) MODEL=$(MODEL) LAYERS=(all) SEEDS=$(SEEDS) TOKENS=(the board's) TASKS=(all 45) JOBS=1 FLASH= RECORD= FRESH= GPU=$(GPU) PYTHON=$(PYTHON)"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"emufpga needs Python 3.11 or later, {sys.executable} is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras, made again when the pins change.
define install
@echo "installing: $(1)"
@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[$(1)]' $(2)
@touch $@
endef

$(VENV)/.sim: pyproject.toml | $(PY)
	$(call install,sim)
$(VENV)/.synth: pyproject.toml | $(PY)
	$(call install,sim$(comma)synth)
$(VENV)/.test: pyproject.toml | $(PY)
	$(call install,serve$(comma)sim$(comma)synth$(comma)test,$(TEST_TORCH))
$(VENV)/.plot: pyproject.toml | $(PY)
	$(call install,sim$(comma)plot)
$(VENV)/.hls4ml: pyproject.toml | $(PY)
	$(call install,sim$(comma)synth$(comma)hls4ml)
$(VENV)/.gpu: pyproject.toml | $(PY)
	$(call install,gpu)
$(VENV)/.report: pyproject.toml | $(PY)
	$(call install,plot)
$(VENV)/.train: pyproject.toml | $(PY)
	$(call install,train)
comma := ,

sim: $(VENV)/.sim ## stream a real model's experts through the Verilated hardware, bit for bit
	@$(PY) -m sim.run --model $(MODEL) --board $(BOARD) $(if $(LAYERS),--layers $(LAYERS))

sim-token: $(VENV)/.sim ## one token through 24 Granite-size layers in the Verilated hardware, bit for bit (minutes)
	@$(PY) -m sim.whole_token --board $(BOARD) $(if $(RECORD),--record)

sweep: $(VENV)/.plot ## what slow links and late stores cost, and what asking ahead saves: a table and a plot (minutes)
	@$(PY) -m sim.sweep $(if $(RECORD),--record)

layer-cycles: $(VENV)/.sim ## cycles of a Granite-size layer by batch and token lanes, in the Verilated hardware (minutes)
	@$(PY) -m sim.layer_cycles $(if $(RECORD),--record)

host-layer: $(VENV)/.sim ## what a Granite-size layer takes in software on this host, by batch, all experts and the union (minutes)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m sim.host_layer $(if $(RECORD),--record)

pipeline: $(VENV)/.sim ## what fetch, align, decode, MAC and drain do in each cycle, traced in the Verilated hardware (a minute)
	@$(PY) -m sim.trace $(if $(RECORD),--record)

replay: $(VENV)/.sim ## replay a real model's routes (ROUTES=FILE.csv) and count the experts that batches fetch
	@$(PY) -m sim.replay $(or $(ROUTES),$(error give ROUTES=FILE.csv, a route_trace v1 file)) $(if $(RECORD),--record)

traces: $(PY) ## count how real models' routes (ROUTES="FILE.csv ...") spread over experts, layer by layer
	@$(PY) -m host.traces $(or $(ROUTES),$(error give ROUTES="FILE.csv ...", route_trace v1 files)) $(if $(RECORD),--record)

cache-replay: $(VENV)/.sim ## replay real models' routes (ROUTES="FILE.csv ...") through an expert cache: hit rates by size and policy
	@$(VENV)/bin/emufpga replay $(or $(ROUTES),$(error give ROUTES="FILE.csv ...", route_trace v1 files)) $(if $(RECORD),--record)

cosim: $(VENV)/.test ## the driver as a process of its own against the Verilated UART and AXI-Stream devices, bit for bit (minutes)
	@$(PY) -m sim.cosim --model $(MODEL) $(if $(LAYERS),--layers $(LAYERS))

faults: $(VENV)/.test ## damage both links and the storage in 2,000 ways; no wrong number, no hang (a quarter of an hour)
	@$(PY) -m tests.faults $(if $(RECORD),--record)

link-rate: $(VENV)/.sim ## what the link costs, counted in RTL, and what the driver costs the simulation (minutes)
	@$(PY) -m sim.link_rate $(if $(RECORD),--record)

report: $(VENV)/.report ## every committed result as one page: build/report/index.html (FRESH=1: with build/sim/'s in their place)
	@$(PY) -m host.report $(if $(FRESH),--fresh)

screenshots: $(VENV)/.test ## the pictures of the report that README shows (needs Debian's chromium)
	@$(PY) -m tests.report.screenshots

suite: $(VENV)/.test ## the 45 tasks: transformers, llama.cpp, golden and the Verilated device; scores, tokens, bits of the logits (minutes)
	@$(PY) -m tests.suite $(if $(RECORD),--record)

capacity: $(VENV)/.test ## memory of a Granite-size model by where its experts are, beside llama.cpp (a quarter of an hour, 8 GB of RAM)
	@$(PY) -m tests.capacity $(if $(RECORD),--record)

# With KEEP=DIR what is interrupted goes on where it was.
AGENTS = $(PY) -m host.cli bench agents --board $(BOARD) --home uart --home pcie-gen2x4 $(if $(KEEP),--keep $(KEEP)) $(if $(RECORD),--record)
agents: $(VENV)/.test ## independent requests at a time, by where the experts are: tasks an hour, bytes, unions (half an hour)
	@$(AGENTS) --home pcie-gen2x4/hdd $(if $(TASKS),--tasks $(TASKS))
	@$(AGENTS) --shape granite-1b --layers 1 --tasks 8 --max-tokens 1 --placements resident,llama.cpp,llama.cpp-read,tape,selected

hls4ml: $(VENV)/.hls4ml ## the same expert through hls4ml and da4ml: error, cycles, multipliers, routed LUTs, queues; no vendor tool (minutes); ONLY=part
	@$(PY) -m tests.hls4ml $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record)

gpu-check: $(VENV)/.gpu ## the 45 tasks with attention on a GPU (GPU=cuda): right answers, tokens a second, VRAM, watts (minutes)
	@$(PY) -m host.cli bench agents --torch-device $(GPU) --n 1,8 --placements resident,tape,selected,cache --board $(BOARD)

netlist: $(VENV)/.test ## synthesise a small device and simulate its ECP5 netlist, bit for bit (minutes); BROKEN=1: a wrong one
	@$(PY) -m tests.netlist $(if $(RECORD),--record) $(if $(BROKEN),--broken)

test: $(VENV)/.test ## run all tests
	@$(PY) -m pytest -n auto

lint: $(VENV)/.test ## ruff and pyright
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m pyright

check: lint test ## lint and test

synth: $(VENV)/.synth ## build BOARD: ECP5 routed with its bitstream, Artix-7 counted and prepared for Vivado (RECORD=1: also boards/results/)
	@$(PY) -m $(if $(filter arty_% nitefury_% acorn_%,$(BOARD)),boards.artix,boards.build --seeds $(SEEDS)) --board $(BOARD) $(if $(TOKENS),--tokens $(TOKENS)) $(if $(RECORD),--record)

boards: $(VENV)/.synth ## route all ECP5 boards that boards/results/ lacks, JOBS at a time, and write the table (hours)
	@$(PY) -m boards.route_all --seeds $(SEEDS) --jobs $(or $(JOBS),1)

program: $(VENV)/.synth ## load BOARD with the bitstream of make synth (FLASH=1: into its flash)
	@$(PY) -m boards.program --board $(BOARD) $(if $(TOKENS),--tokens $(TOKENS)) $(if $(FLASH),--flash)

formal: $(VENV)/.test ## prove the control blocks by induction (also part of test), and see each proof fail on broken copies
	@$(PY) -m pytest -n auto -m "formal or broken" tests/formal

accuracy: $(VENV)/.sim ## error of the arithmetic against float64, beside llama.cpp's Q8_K
	@$(PY) -m sim.accuracy $(if $(RECORD),--record)

mutants: $(VENV)/.test ## break the hardware and the golden model on purpose; each break must fail a test
	@$(PY) -m tests.mutants

train: $(VENV)/.train ## train models/tiny-moe-q6k.gguf again (CPU)
	@OMP_WAIT_POLICY=PASSIVE $(PY) -m models.train_tiny_moe --out models/tiny-moe-q6k.gguf

clean: ## remove build/
	rm -rf $(BUILD)
