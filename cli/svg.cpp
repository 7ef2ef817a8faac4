#include "cli/svg.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

namespace headrace::cli {
namespace {

constexpr std::size_t kTextMax = 60;   // characters that have room
constexpr std::size_t kHintMax = 300;  // characters
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

bool begins_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;
}

std::string title_element(std::string_view hint) {
  return hint.empty() ? std::string() : fmt::format("<title>{}</title>", xml_text(shortened(hint, kHintMax)));
}

std::string_view word(Svg::Anchor anchor) {
  switch (anchor) {
    case Svg::Anchor::kStart: return "start";
    case Svg::Anchor::kMiddle: return "middle";
    case Svg::Anchor::kEnd: return "end";
  }
  return "start";
}

}  // namespace

std::string shortened(std::string_view text, std::size_t characters_max) {
  std::size_t characters = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (begins_character(text[i]) && characters++ == characters_max) return std::string(text.substr(0, i)) + "\xE2\x80\xA6";
  }
  return std::string(text);
}

std::string xml_text(std::string_view text) {
  std::string escaped;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::string_view rest = text.substr(i);
    if (rest.starts_with("\xEF\xBF\xBE") || rest.starts_with("\xEF\xBF\xBF")) {
      escaped += kReplacement;
      i += 2;
      continue;
    }
    switch (text[i]) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default:
        if (static_cast<unsigned char>(text[i]) < 0x20U) {
          escaped += kReplacement;
        } else {
          escaped += text[i];
        }
    }
  }
  return escaped;
}

Svg::Svg(double width, double height, std::string_view title) {
  fmt::format_to(
      std::back_inserter(out_),
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" "
      "font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\">\n{2}\n<rect width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "fill=\"#ffffff\"/>\n",
      width, height, title_element(title));
  text(16, 26, title, Anchor::kStart, true);
}

void Svg::text(double x, double y, std::string_view words, Anchor anchor, bool strong) {
  fmt::format_to(std::back_inserter(out_), "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{}\">{}</text>\n", x,
                 y, strong ? 15 : 12, strong ? "#1b1f24" : "#57606a", word(anchor),
                 xml_text(shortened(words, strong ? 2 * kTextMax : kTextMax)));
}

void Svg::box(double x, double y, double width, double height, std::string_view fill, std::string_view edge, std::string_view hint) {
  fmt::format_to(
      std::back_inserter(out_),
      "<rect x=\"{:.3f}\" y=\"{:.3f}\" width=\"{:.3f}\" height=\"{:.3f}\" fill=\"{}\" stroke=\"{}\" stroke-width=\"0.8\">{}</rect>\n", x, y,
      width, height, fill, edge, title_element(hint));
}

void Svg::band(double x1, double y1, double x2, double y2, double width, std::string_view hint) {
  const double middle = (x1 + x2) / 2;
  fmt::format_to(std::back_inserter(out_),
                 "<path d=\"M{0:.1f} {1:.3f} C{4:.1f} {1:.3f} {4:.1f} {3:.3f} {2:.1f} {3:.3f}\" fill=\"none\" stroke=\"#2f6fb0\" "
                 "stroke-opacity=\"0.45\" stroke-width=\"{5:.3f}\">{6}</path>\n",
                 x1, y1, x2, y2, middle, width, title_element(hint));
}

std::string Svg::done() && {
  out_ += "</svg>\n";
  return std::move(out_);
}

}  // namespace headrace::cli
