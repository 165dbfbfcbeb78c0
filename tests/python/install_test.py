"""install(): mlx-lm on our caches, and back."""

import importlib
import subprocess
import sys
import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx

import reprise.cache
import reprise.mlx_lm
from reprise.errors import InvalidArgumentError, UnsupportedError

try:
    import mlx_lm
    import mlx_lm.models.base
    import mlx_lm.models.cache
    import mlx_lm.models.llama
    import mlx_lm.server

    # The package has a function of that name.
    generate = sys.modules["mlx_lm.generate"]
except ModuleNotFoundError:
    mlx_lm = None


def globals_of_mlx_lm():
    return {
        name: dict(vars(module))
        for name, module in list(sys.modules.items())
        if name.startswith("mlx_lm") and module is not None
    }


def tiny_llama(**changes):
    mx.random.seed(1)
    settings = dict(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=50,
    )
    model = mlx_lm.models.llama.Model(mlx_lm.models.llama.ModelArgs(**(settings | changes)))
    mx.eval(model.parameters())
    return model


def generated(model, prompt, count=8, **options):
    steps = generate.generate_step(mx.array(prompt), model, max_tokens=count, **options)
    return [token for token, _ in steps]


@unittest.skipIf(mlx_lm is None, "needs mlx-lm")
class InstallTest(unittest.TestCase):
    def setUp(self):
        self.assertFalse(reprise.mlx_lm.is_installed())
        self.before = globals_of_mlx_lm()
        self.server_init = mlx_lm.server.ResponseGenerator.__init__

    def tearDown(self):
        reprise.mlx_lm.uninstall()
        self.assert_restored()

    def assert_restored(self):
        self.assertIs(mlx_lm.server.ResponseGenerator.__init__, self.server_init)
        for module, names in self.before.items():
            now = vars(sys.modules[module])
            for name, value in names.items():
                self.assertIs(now[name], value, f"{module}.{name}")

    def test_each_name_that_both_have_is_ours(self):
        theirs = self.before["mlx_lm.models.cache"]
        own = [n for n, v in theirs.items() if getattr(v, "__module__", None) == "mlx_lm.models.cache"]
        self.assertIn("KVCache", own)
        self.assertIn("_BaseCache", own)
        with reprise.mlx_lm.installed():
            for name in own:
                self.assertIsNot(getattr(mlx_lm.models.cache, name), theirs[name], name)
            for name in set(own) - {"_BaseCache"}:
                self.assertIs(getattr(mlx_lm.models.cache, name), getattr(reprise.cache, name))
            # And where they were imported by name.
            self.assertIs(generate.make_prompt_cache, reprise.cache.make_prompt_cache)
            self.assertIs(generate.QuantizedKVCache, reprise.cache.QuantizedKVCache)
            self.assertIs(mlx_lm.server.LRUPromptCache, reprise.cache.LRUPromptCache)
            self.assertIs(mlx_lm.models.llama.KVCache, reprise.cache.KVCache)
            ours = mlx_lm.models.base.scaled_dot_product_attention
            self.assertIsNot(ours, self.before["mlx_lm.models.base"]["scaled_dot_product_attention"])
            self.assertIs(mlx_lm.models.llama.scaled_dot_product_attention, ours)
        self.assert_restored()

    def test_installing_twice_is_installing_once(self):
        reprise.mlx_lm.install()
        during = globals_of_mlx_lm()
        reprise.mlx_lm.install()
        for module, names in globals_of_mlx_lm().items():
            for name, value in names.items():
                self.assertIs(during[module][name], value)
        reprise.mlx_lm.uninstall()
        self.assert_restored()
        reprise.mlx_lm.uninstall()
        self.assert_restored()
        reprise.mlx_lm.install()
        self.assertIs(mlx_lm.models.cache.KVCache, reprise.cache.KVCache)

    def test_the_context_nests_and_leaves_an_installation_alone(self):
        with reprise.mlx_lm.installed():
            with reprise.mlx_lm.installed():
                pass
            self.assertTrue(reprise.mlx_lm.is_installed())
        self.assertFalse(reprise.mlx_lm.is_installed())
        with self.assertRaises(ZeroDivisionError), reprise.mlx_lm.installed():
            1 / 0
        self.assertFalse(reprise.mlx_lm.is_installed())
        reprise.mlx_lm.install()
        with reprise.mlx_lm.installed():
            pass
        self.assertTrue(reprise.mlx_lm.is_installed())
        with reprise.mlx_lm.installed():
            reprise.mlx_lm.uninstall()
            self.assertFalse(reprise.mlx_lm.is_installed())
        self.assertFalse(reprise.mlx_lm.is_installed())

    def test_modules_loaded_later_have_ours_and_give_them_back(self):
        name = "mlx_lm.models.mamba2"
        loaded = sys.modules.pop(name, None)
        try:
            with reprise.mlx_lm.installed():
                module = importlib.import_module(name)
                self.assertIs(module.ArraysCache, reprise.cache.ArraysCache)
            self.assertIs(module.ArraysCache, mlx_lm.models.cache.ArraysCache)
            self.assertIsNot(module.ArraysCache, reprise.cache.ArraysCache)
        finally:
            sys.modules.pop(name, None)
            if loaded is not None:
                sys.modules[name] = loaded

    def test_what_others_put_there_stays(self):
        mine = object()
        reprise.mlx_lm.install()
        generate.TokenBuffer = mine
        try:
            reprise.mlx_lm.uninstall()
            self.assertIs(generate.TokenBuffer, mine)
        finally:
            generate.TokenBuffer = mlx_lm.models.cache.TokenBuffer

    def test_other_versions_are_refused_and_nothing_changes(self):
        for version in ("0.31.3", "0.9", "unknown"):
            with mock.patch.object(mlx_lm, "__version__", version), self.assertRaisesRegex(UnsupportedError, version):
                reprise.mlx_lm.install()
        for version in ("0.32.0", "0.40.1", "1.0"):
            with mock.patch.object(mlx_lm, "__version__", version), reprise.mlx_lm.installed():
                pass

    def test_without_mlx_lm_the_error_says_so(self):
        with mock.patch.dict(sys.modules, {"mlx_lm": None}):
            with self.assertRaisesRegex(ModuleNotFoundError, "mlx-lm must be installed"):
                reprise.mlx_lm.install()
        self.assertFalse(reprise.mlx_lm.is_installed())

    def test_a_failure_halfway_leaves_nothing_behind(self):
        replaced = reprise.mlx_lm._Exchange._set

        def fail_at_the_server(exchange, owner, name, ours):
            if owner is mlx_lm.server.ResponseGenerator:
                raise RuntimeError("halfway")
            replaced(exchange, owner, name, ours)

        with mock.patch.object(reprise.mlx_lm._Exchange, "_set", fail_at_the_server):
            with self.assertRaisesRegex(RuntimeError, "halfway"):
                reprise.mlx_lm.install()
        self.assertFalse(reprise.mlx_lm.is_installed())
        self.assert_restored()

    def test_threads(self):
        errors = []

        def work():
            try:
                for _ in range(20):
                    with reprise.mlx_lm.installed():
                        if mlx_lm.models.cache.KVCache is not reprise.cache.KVCache:
                            errors.append("not ours")
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_the_byte_limit_of_the_server_is_the_stores(self):
        def make(limit):
            store = mlx_lm.server.LRUPromptCache(3)
            provider = SimpleNamespace(cli_args=SimpleNamespace(prompt_cache_bytes=limit))
            with mock.patch.object(mlx_lm.server, "Thread"):
                mlx_lm.server.ResponseGenerator(provider, store)
            return store

        reprise.mlx_lm.install()
        self.assertEqual(make(1000).max_bytes, 1000)
        self.assertEqual(make(None).max_bytes, 1 << 63)

    def test_the_log_of_the_server_tells_whose_caches_it_uses(self):
        reprise.mlx_lm.install()
        provider = SimpleNamespace(cli_args=SimpleNamespace(prompt_cache_bytes=None))
        with mock.patch.object(mlx_lm.server, "Thread"), self.assertLogs("reprise", "INFO") as logs:
            mlx_lm.server.ResponseGenerator(provider, mlx_lm.server.LRUPromptCache(3))
        self.assertIn(f"mlx-lm {mlx_lm.__version__} on the caches of reprise {reprise.__version__}", logs.output[0])

    def test_the_command_line(self):
        for arguments, code, text in ((["--version"], 0, mlx_lm.__version__), (["nonsense"], 1, "subcommand")):
            done = subprocess.run(
                [sys.executable, "-m", "reprise.mlx_lm", *arguments], capture_output=True, text=True, check=False
            )
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(text, done.stdout + done.stderr)


@unittest.skipIf(mlx_lm is None, "needs mlx-lm")
class ModelTest(unittest.TestCase):
    """Needs no weights: a random model answers alike on both kinds of caches."""

    def setUp(self):
        self.model = tiny_llama()
        self.prompt = list(range(1, 21))

    def test_generation_is_the_same(self):
        for options in (
            {},
            {"prefill_step_size": 7},
            {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 6},
            {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 22},
        ):
            expected = generated(self.model, self.prompt, **options)
            with reprise.mlx_lm.installed():
                self.assertEqual(generated(self.model, self.prompt, **options), expected, options)

    def test_a_window_is_the_same(self):
        model = tiny_llama(
            layer_types=["sliding_attention", "full_attention"], sliding_window=8, max_position_embeddings=64
        )
        expected = generated(model, self.prompt, count=12, prefill_step_size=5)
        with reprise.mlx_lm.installed():
            self.assertEqual(generated(model, self.prompt, count=12, prefill_step_size=5), expected)
            # mlx-lm refuses at the first quantising step.
            options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10}
            self.assertEqual(len(generated(model, self.prompt, **options)), 8)

    def test_the_bound_reaches_the_model(self):
        with reprise.mlx_lm.installed():
            caches = mlx_lm.models.cache.make_prompt_cache(self.model, 16)
            self.assertEqual([type(c) for c in caches], [reprise.cache.RotatingKVCache] * 2)
            generated(self.model, self.prompt, count=20, prompt_cache=caches)
            self.assertLessEqual(caches[0].keys.shape[2], 16)

    def test_bits_that_do_not_fit_are_told_before_anything_is_computed(self):
        evaluated = []
        with reprise.mlx_lm.installed(), mock.patch.object(mx, "eval", evaluated.append):
            with self.assertRaises(InvalidArgumentError):
                generated(self.model, self.prompt, kv_bits=8, kv_group_size=64, quantized_kv_start=1000)
        self.assertEqual(evaluated, [])

    def test_a_batch_answers_as_each_alone(self):
        prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
        expected = [generated(self.model, prompt, count=6) for prompt in prompts]
        with reprise.mlx_lm.installed():
            batch = generate.BatchGenerator(self.model, max_tokens=6)
            uids = batch.insert(prompts)
            tokens = {uid: [] for uid in uids}
            caches = {}
            while responses := batch.next_generated():
                for response in responses:
                    tokens[response.uid].append(response.token)
                    if response.finish_reason is not None:
                        caches[response.uid] = response.prompt_cache
            batch.close()
        self.assertEqual([tokens[uid] for uid in uids], expected)
        self.assertEqual([type(c[0]).__name__ for c in caches.values()], ["KVCache"] * 3)
        self.assertIsInstance(caches[uids[0]][0], reprise.cache.KVCache)


if __name__ == "__main__":
    unittest.main()
