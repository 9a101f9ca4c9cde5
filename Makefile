# Every command does its own set-up; nothing but Python 3.11 or newer is needed before.
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
WORKERS ?= 3
# Strict, and never --quiet: with that, warnings are not counted, and a broken link passes.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: demo test check docs format protos benchmark sbom supply-check clean

demo: ## real daemons on this machine, a few rounds, ending with the reports
	@./setup.sh
	@$(BIN)/python -m medsilo.simulation.demo

test: ## all tests, several at once
	@./setup.sh --tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: ## style, types, schemas, import contracts
	@./setup.sh
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/python -m medsilo.protos.generate --check
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(SITE)
	$(BIN)/python -m supply_chain.pins

docs: ## the documentation as a site, in build/site
	@./setup.sh
	$(BIN)/python docs/generate.py
	$(SITE)

sbom: ## everything that is installed, as CycloneDX in build/sbom.cdx.json, held to its schema
	@./setup.sh
	@mkdir -p build
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --validate -o build/sbom.cdx.json

supply-check: ## what is pinned, and what is known against it; fails where nobody could be asked
	@./setup.sh
	$(BIN)/python -m supply_chain.pins
	$(BIN)/python -m supply_chain.vulnerabilities

format: ## put the style right
	@./setup.sh
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: ## generate the Python code of the message schemas
	@./setup.sh
	$(BIN)/python -m medsilo.protos.generate

benchmark: ## a round's cost beyond training
	@./setup.sh
	$(BIN)/python benchmarks/round_cost.py

clean: ## remove what the commands made, the virtual environment included
	rm -rf $(VENV) demo build *.egg-info
