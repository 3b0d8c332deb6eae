// Runs a package that `python -m fairseq_tutel.export aot` made, without Python.
//
//   run model.pt2 NUMBERS TOKEN...         continue a text by so many tokens, always the likeliest
//   run model.pt2 0 TOKEN... > logits.bin  logits of the text's tokens, fp32 [L, V]
//   run layer.pt2 < rows.bin > out.bin     rows of a layer, fp32 [T, M] each
//
// Tokens are numbers of the model's dictionary: 2 is </s>, which stands before every text, and the
// first line of dict.txt is 4.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

using torch::inductor::AOTIModelPackageLoader;

namespace {

constexpr std::int64_t kEnd = 2;  // </s>
constexpr std::int64_t kPad = 1;

at::Tensor run(AOTIModelPackageLoader& package, const at::Tensor& input) {
  return package.run({input})[0];
}

void write(const at::Tensor& values) {
  const at::Tensor rows = values.cpu().contiguous();
  std::fwrite(rows.data_ptr(), 1, rows.nbytes(), stdout);
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "bfloat16") return at::kBFloat16;
  return name == "float16" ? at::kHalf : at::kFloat;
}

void run_layer(AOTIModelPackageLoader& package, std::int64_t model_dim, at::ScalarType dtype) {
  std::vector<char> bytes{std::istreambuf_iterator<char>(std::cin), {}};
  const auto row = model_dim * static_cast<std::int64_t>(sizeof(float));
  const auto count = static_cast<std::int64_t>(bytes.size()) / row;
  const auto rows = at::from_blob(bytes.data(), {count, model_dim}, at::kFloat);
  write(run(package, rows.to(dtype)).to(at::kFloat));
}

void run_model(AOTIModelPackageLoader& package, int more, std::vector<std::int64_t> tokens) {
  const auto length = [&] { return static_cast<std::int64_t>(tokens.size()); };
  const auto logits = [&] {
    return run(package, at::from_blob(tokens.data(), {1, length()}, at::kLong))[0].to(at::kFloat);
  };
  if (more == 0) {
    write(logits());
    return;
  }
  for (int step = 0; step < more && (step == 0 || tokens.back() != kEnd); ++step) {
    at::Tensor last = logits()[-1];
    last[kPad] = -INFINITY;  // fairseq never generates padding
    tokens.push_back(last.argmax().item<std::int64_t>());
    std::printf("%lld\n", static_cast<long long>(tokens.back()));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: run model.pt2 NUMBER TOKEN... | run layer.pt2 < rows > rows\n");
    return 2;
  }
  const c10::InferenceMode no_gradients;
  AOTIModelPackageLoader package(argv[1]);
  auto facts = package.get_metadata();
  if (facts["kind"] == "layer") {
    run_layer(package, std::stoll(facts["model_dim"]), dtype_of(facts["dtype"]));
    return 0;
  }
  if (argc < 4) {
    std::fprintf(stderr, "%s is a model: give a number and at least one token\n", argv[1]);
    return 2;
  }
  std::vector<std::int64_t> tokens;
  for (int i = 3; i < argc; ++i) tokens.push_back(std::stoll(argv[i]));
  const std::int64_t size = std::stoll(facts["vocab_size"]);
  for (const auto token : tokens) {
    if (token < 0 || token >= size) {
      std::fprintf(stderr, "token %lld is not below %lld\n", (long long)token, (long long)size);
      return 2;
    }
  }
  run_model(package, std::atoi(argv[2]), tokens);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
