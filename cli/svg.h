#pragma once

#include <string>
#include <string_view>

namespace headrace::cli {

/// Text as it may stand in XML, at most `characters_max` of it; what XML has no place for becomes U+FFFD. Takes UTF-8.
std::string xml_text(std::string_view text, std::size_t characters_max);

/// A picture of boxes, bands and words that is put together piece by piece. Lengths are pixels; hints show under the pointer.
class Svg {
 public:
  enum class Anchor : std::uint8_t { kStart, kMiddle, kEnd };

  Svg(double width, double height, std::string_view title);

  void text(double x, double y, std::string_view words, Anchor anchor = Anchor::kStart, bool strong = false);
  void box(double x, double y, double width, double height, std::string_view fill, std::string_view edge, std::string_view hint = {});
  /// From one point to another, with level ends; `width` as it stands at both.
  void band(double x1, double y1, double x2, double y2, double width, std::string_view hint);
  std::string done() &&;

 private:
  std::string out_;
};

}  // namespace headrace::cli
