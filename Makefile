# Every target is one script, so that a person, CI and make do the same thing.
.PHONY: help setup serve test check quick soak readme docs lint vllm-env test-vllm test-clients release clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv with Tandem and what serving needs (`make test` and `make check` add development tools)
	@scripts/setup

serve:  ## serve the demo model on this machine, over two pipeline stages but on a Mac (ARGS="..." adds options)
	@scripts/serve $(ARGS)

test:  ## every test, including the slow ones and those with the demo model
	@scripts/test $(ARGS)

check:  ## lint, types, import contracts and the quick tests
	@scripts/check

quick:  ## lint and the quick tests that name what has changed since the last commit (ARGS="COMMIT" for another)
	@scripts/setup --dev
	@scripts/quick $(ARGS)

soak:  ## an hour of random faults, features and bad neighbours combined (ARGS="--seed 7 --minutes 600" for another storm)
	@scripts/soak $(ARGS)

readme:  ## run every command of README.md, and check what it answers
	@scripts/setup --dev
	@scripts/readme $(ARGS)

docs:  ## build the documentation site into build/site; a link that leads nowhere is an error
	@scripts/setup --dev
	@.venv/bin/mkdocs build --strict --quiet

lint:  ## lint, types and import contracts
	@scripts/lint

vllm-env:  ## make .vllm-venv: vLLM with Tandem's plugin, and Ray
	@scripts/vllm_env

test-vllm:  ## the tests of the vLLM plugin, in that environment
	@scripts/test_vllm $(ARGS)

test-clients:  ## clients of others, unmodified, in .clients-venv; prints the requests of each
	@scripts/test_clients $(ARGS)

release:  ## build wheel and sdist, and try them in empty environments (publishes nothing)
	@scripts/release $(ARGS)

clean:  ## remove .venv and everything that was built (the caches of models and environments stay)
	rm -rf .venv .vllm-venv .clients-venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
