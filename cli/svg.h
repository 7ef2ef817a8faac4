#pragma once

#include <string>
#include <string_view>

namespace headrace::cli {

/// The first `characters_max` characters of UTF-8, and an ellipsis where there are more.
std::string shortened(std::string_view text, std::size_t characters_max);
/// UTF-8 as it may stand in XML; what that has no place for becomes U+FFFD.
std::string xml_text(std::string_view text);

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
