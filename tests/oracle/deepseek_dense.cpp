#include "tests/oracle/deepseek_dense.h"

#include <stdexcept>

namespace headrace::oracle {
namespace {

using Bytes = DenseBytes;

std::int64_t round_up(std::int64_t size, std::int64_t to) {
  return (size + to - 1) / to * to;
}

std::uint8_t& at(Bytes& bytes, std::int64_t index) {
  return bytes.at(static_cast<std::size_t>(index));
}
std::uint8_t at(const Bytes& bytes, std::int64_t index) {
  return bytes.at(static_cast<std::size_t>(index));
}

/// rows x columns bytes, byte (r, c) = element(r, c).
template <class Element>
Bytes matrix(std::int64_t rows, std::int64_t columns, const Element& element) {
  Bytes bytes(static_cast<std::size_t>(rows * columns));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) bytes[static_cast<std::size_t>(r * columns + c)] = element(r, c);
  }
  return bytes;
}

/// Tiles of 128 x 4, zero where the matrix ends inside one.
template <class Element>
Bytes swizzled(std::int64_t rows, std::int64_t columns, const Element& element) {
  const std::int64_t tiles_across = (columns + 3) / 4;
  Bytes bytes(static_cast<std::size_t>((rows + 127) / 128 * tiles_across * 512), 0);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t tile = r / 128 * tiles_across + c / 4;
      at(bytes, tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4) = element(r, c);
    }
  }
  return bytes;
}

/// [groups][columns / 4][rows of a group] words of 4 bytes.
template <class Element>
Bytes grouped_words(std::int64_t groups, std::int64_t group_rows, std::int64_t columns, const Element& element) {
  Bytes bytes(static_cast<std::size_t>(groups * group_rows * columns), 0);
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t r = 0; r < group_rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        at(bytes, ((g * (columns / 4) + c / 4) * group_rows + r) * 4 + c % 4) = element(g * group_rows + r, c);
      }
    }
  }
  return bytes;
}

class Writer {
 public:
  Writer(const DenseModel& model, const DenseForm& form, int layer, std::string scale, const DenseSource& source)
      : m_(model), f_(form), layer_("layers." + std::to_string(layer) + "."), scale_(std::move(scale)), source_(source) {}

  std::map<std::string, Bytes> all() {
    top("embed.weight", "model.embed_tokens.weight");
    top("head.weight", "lm_head.weight");
    query_and_key();
    query_heads();
    output_groups();
    output();
    sink();
    shared_gate_up();
    shared_down();
    if (m_.indexer > 0) replicated("attn.indexer.wq_b", m_.indexer, m_.q_lora);
    if (m_.engram > 0) replicated("engram.wkv", (m_.hc_mult + 1) * m_.hidden, m_.engram);
    return std::move(out_);
  }

 private:
  const Bytes& weight(const std::string& name) const { return source_(layer_ + name + ".weight"); }
  const Bytes& scale(const std::string& name) const { return source_(layer_ + name + ".scale"); }

  /// `value(r, c)` of a weight, `scale(r, g)` for row r and block of columns g of the rank's matrix.
  template <class Weight, class Scale>
  void linear(const std::string& name, std::int64_t rows, std::int64_t columns, DenseScales form, const Weight& value, const Scale& scale) {
    const std::string param = "model." + layer_ + name + ".";
    out_[param + "weight"] = matrix(rows, columns, value);
    Bytes& scales = out_[param + scale_];
    const std::int64_t groups = columns / m_.block;
    switch (form) {
      case DenseScales::kBlocks:
        scales = matrix(rows / m_.block, groups, [&](std::int64_t r, std::int64_t g) { return scale(r * m_.block, g); });
        return;
      case DenseScales::kRows: scales = matrix(rows, groups, scale); return;
      case DenseScales::kSwizzled: scales = swizzled(rows, groups, scale); return;
    }
    throw std::logic_error("no such form");
  }

  /// Rows of the vocabulary; what the rank has beyond its end is zero.
  void top(const std::string& name, const std::string& param) {
    const Bytes& table = source_(name);
    const std::int64_t rows = round_up(m_.vocab, f_.tp) / f_.tp;
    out_[param] = matrix(rows, 2 * m_.hidden, [&](std::int64_t r, std::int64_t c) -> std::uint8_t {
      const std::int64_t token = f_.rank * rows + r;
      return token < m_.vocab ? at(table, token * 2 * m_.hidden + c) : 0;
    });
  }

  void replicated(const std::string& name, std::int64_t rows, std::int64_t columns) {
    const Bytes& w = weight(name);
    const Bytes& s = scale(name);
    linear(
        name, rows, columns, f_.scales, [&](std::int64_t r, std::int64_t c) { return at(w, r * columns + c); },
        [&](std::int64_t r, std::int64_t g) { return at(s, r / m_.block * (columns / m_.block) + g); });
  }

  void query_and_key() {
    const Bytes* w[] = {&weight("attn.wq_a"), &weight("attn.wkv")};
    const Bytes* s[] = {&scale("attn.wq_a"), &scale("attn.wkv")};
    const std::int64_t columns = m_.hidden;
    const auto part = [&](std::int64_t r) { return r < m_.q_lora ? 0 : 1; };
    const auto row = [&](std::int64_t r) { return r < m_.q_lora ? r : r - m_.q_lora; };
    linear(
        "attn.fused_wqa_wkv", m_.q_lora + m_.head_dim, columns, f_.scales,
        [&](std::int64_t r, std::int64_t c) { return at(*w[part(r)], row(r) * columns + c); },
        [&](std::int64_t r, std::int64_t g) { return at(*s[part(r)], row(r) / m_.block * (columns / m_.block) + g); });
  }

  /// Heads divide over ranks. Mega attention: 16 features of every head in turn.
  void query_heads() {
    const Bytes& w = weight("attn.wq_b");
    const Bytes& s = scale("attn.wq_b");
    const std::int64_t columns = m_.q_lora;
    const std::int64_t heads = m_.heads / f_.tp;
    const auto row_of = [&](std::int64_t r) {
      if (!f_.mega_attention) return (f_.rank * heads) * m_.head_dim + r;
      const std::int64_t head = r % (heads * 16) / 16;
      const std::int64_t feature = r / (heads * 16) * 16 + r % 16;
      return (f_.rank * heads + head) * m_.head_dim + feature;
    };
    // Blocks of rows no longer stay together: the permuted projection has a scale for each row.
    const DenseScales form = f_.mega_attention && f_.scales == DenseScales::kBlocks ? DenseScales::kRows : f_.scales;
    linear(
        "attn.wq_b", heads * m_.head_dim, columns, form, [&](std::int64_t r, std::int64_t c) { return at(w, row_of(r) * columns + c); },
        [&](std::int64_t r, std::int64_t g) { return at(s, row_of(r) / m_.block * (columns / m_.block) + g); });
  }

  /// Groups of rows divide over ranks. Mega attention: 32 columns of every head of the group in turn.
  void output_groups() {
    const Bytes& w = weight("attn.wo_a");
    const Bytes& s = scale("attn.wo_a");
    const std::int64_t columns = m_.heads * m_.head_dim / m_.o_groups;
    const std::int64_t heads = m_.heads / m_.o_groups;
    const std::int64_t groups = m_.o_groups / f_.tp;
    const std::int64_t first = f_.rank * groups * m_.o_lora;
    const auto column_of = [&](std::int64_t c) {
      if (!f_.mega_attention) return c;
      return c / 32 % heads * m_.head_dim + c / 32 / heads * 32 + c % 32;
    };
    const auto scale_of = [&](std::int64_t r, std::int64_t g) {
      return at(s, (first + r) / m_.block * (columns / m_.block) + column_of(g * m_.block) / m_.block);
    };
    linear(
        "attn.wo_a", groups * m_.o_lora, columns, f_.scales,
        [&](std::int64_t r, std::int64_t c) { return at(w, (first + r) * columns + column_of(c)); }, scale_of);
    if (f_.grouped_wo_a) {
      out_["model." + layer_ + "attn.wo_a." + scale_] = grouped_words(groups, m_.o_lora, columns / m_.block, scale_of);
    }
  }

  void output() {
    const Bytes& w = weight("attn.wo_b");
    const Bytes& s = scale("attn.wo_b");
    const std::int64_t all = m_.o_groups * m_.o_lora;
    const std::int64_t columns = all / f_.tp;
    linear(
        "attn.wo_b", m_.hidden, columns, f_.scales, [&](std::int64_t r, std::int64_t c) { return at(w, r * all + f_.rank * columns + c); },
        [&](std::int64_t r, std::int64_t g) {
          return at(s, r / m_.block * (all / m_.block) + (f_.rank * columns + g * m_.block) / m_.block);
        });
  }

  /// One float a head, in a parameter of as many heads as the kernel takes, 64 or 128; minus infinity behind the rank's.
  void sink() {
    const Bytes& sinks = source_(layer_ + "attn.attn_sink");
    const std::int64_t heads = m_.heads / f_.tp;
    Bytes& out = out_["model." + layer_ + "attn.attn_sink"];
    for (std::int64_t h = 0; h < (heads <= 64 ? 64 : 128); ++h) {
      for (std::int64_t b = 0; b < 4; ++b) {
        const std::uint8_t minus_infinity[] = {0x00, 0x00, 0x80, 0xFF};
        out.push_back(h < heads ? at(sinks, (f_.rank * heads + h) * 4 + b) : minus_infinity[b]);
      }
    }
  }

  /// Features of one rank's share, after zeros have made them a multiple of what divides into blocks on every rank.
  std::int64_t shared_share() const { return round_up(m_.shared, f_.tp * m_.block) / f_.tp; }

  void shared_gate_up() {
    const Bytes* w[] = {&weight("ffn.shared_experts.w1"), &weight("ffn.shared_experts.w3")};
    const Bytes* s[] = {&scale("ffn.shared_experts.w1"), &scale("ffn.shared_experts.w3")};
    const std::int64_t share = shared_share();
    const std::int64_t columns = m_.hidden;
    const auto feature = [&](std::int64_t r) { return f_.rank * share + r % share; };
    linear(
        "ffn.shared_experts.gate_up_proj", 2 * share, columns, f_.scales,
        [&](std::int64_t r, std::int64_t c) -> std::uint8_t {
          return feature(r) < m_.shared ? at(*w[r / share], feature(r) * columns + c) : 0;
        },
        [&](std::int64_t r, std::int64_t g) -> std::uint8_t {
          return feature(r) < m_.shared ? at(*s[r / share], feature(r) / m_.block * (columns / m_.block) + g) : 0;
        });
  }

  void shared_down() {
    const Bytes& w = weight("ffn.shared_experts.w2");
    const Bytes& s = scale("ffn.shared_experts.w2");
    const std::int64_t share = shared_share();
    linear(
        "ffn.shared_experts.down_proj", m_.hidden, share, f_.scales,
        [&](std::int64_t r, std::int64_t c) -> std::uint8_t {
          const std::int64_t feature = f_.rank * share + c;
          return feature < m_.shared ? at(w, r * m_.shared + feature) : 0;
        },
        [&](std::int64_t r, std::int64_t g) -> std::uint8_t {
          const std::int64_t feature = f_.rank * share + g * m_.block;
          return feature < m_.shared ? at(s, r / m_.block * (m_.shared / m_.block) + feature / m_.block) : 0;
        });
  }

  const DenseModel& m_;
  const DenseForm& f_;
  std::string layer_;
  std::string scale_;
  const DenseSource& source_;
  std::map<std::string, Bytes> out_;
};

}  // namespace

std::map<std::string, DenseBytes> dense_storages(const DenseModel& model, const DenseForm& form, int layer, const std::string& scale,
                                                 const DenseSource& source) {
  return Writer(model, form, layer, scale, source).all();
}

}  // namespace headrace::oracle
