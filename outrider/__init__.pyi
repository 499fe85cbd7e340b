from outrider.offline.async_llm import AsyncLLM as AsyncLLM
from outrider.offline.llm import LLM as LLM
from outrider.offline.outputs import CompletionOutput as CompletionOutput
from outrider.offline.outputs import RequestOutput as RequestOutput
from outrider.offline.params import RequestOutputKind as RequestOutputKind
from outrider.offline.params import SamplingParams as SamplingParams
from outrider.offline.pipeline import GenerationConfig as GenerationConfig
from outrider.offline.pipeline import PytorchEngineConfig as PytorchEngineConfig
from outrider.offline.pipeline import SpeculativeConfig as SpeculativeConfig
from outrider.offline.pipeline import pipeline as pipeline

__version__: str
