"""Loaded once by the process that every job is forked from: what a first simulation loads is there already."""

from infersim.config.scenario import load_scenario
from infersim.explain.summary import summarize
from infersim.planning.briefing import brief_run
from infersim.run import run

from .work import parts_of, shorter

results = run(shorter(load_scenario("llama-8b-h100"), 100))
parts_of(brief_run(results, summarize(results)), results[0])
