#pragma once

#include <cstddef>
#include <cstdint>

// Every bound on what a peer may send or ask for, in one table; docs/protocol.md lists them by these names.
namespace headrace::limits {

inline constexpr std::uint32_t kProtocolVersion = 1;
inline constexpr std::size_t kMessageBytesMax = std::size_t{256} << 20;   // one message, without its attachment
inline constexpr std::size_t kAttachmentBytesMax = std::size_t{1} << 30;  // bytes of an inline bucket
inline constexpr std::size_t kManifestEntriesMax = std::size_t{1} << 21;  // entries of one sender's manifest
inline constexpr std::size_t kExtentsMax = std::size_t{1} << 20;          // extents of one bucket
inline constexpr std::size_t kBoxesMax = 4'096;                           // wanted boxes of one entry
inline constexpr std::size_t kNameBytesMax = 4'096;                       // one tensor name
inline constexpr std::size_t kTextBytesMax = 16'384;                      // one error text, path or endpoint
inline constexpr std::size_t kDefectsMax = 1'000;                         // defects listed in one REJECT; the count tells of more
inline constexpr std::size_t kDimsMax = 8;                                // dimensions of one tensor
inline constexpr std::size_t kSendersMax = 256;                           // senders of one session
inline constexpr std::size_t kPeersMax = 1'024;                           // connections of one receiver
inline constexpr std::size_t kRanksMax = 4'096;                           // ranks of one engine
inline constexpr std::size_t kMemoriesMax = 256;                          // memories one sender has attached at a receiver
inline constexpr std::size_t kIdBytesMax = 64;                            // job, engine, sender, run and scope names
inline constexpr std::size_t kOutputsMax = 1'000;                         // storages listed in one receipt with another proof than bytes
inline constexpr std::size_t kValueRulesMax = 4'096;                      // rules of the values that one receiver asks for
inline constexpr std::size_t kValuesMax = std::size_t{1} << 20;           // values in one MANIFEST
inline constexpr std::size_t kValueBytesMax = 16;                         // one of them
inline constexpr std::size_t kReadBytesMax = std::size_t{4} << 20;        // one READ
inline constexpr std::int64_t kBucketBytesDefault = std::int64_t{64} << 20;
inline constexpr std::int64_t kBucketBytesMin = std::int64_t{64} << 10;
inline constexpr std::int64_t kBucketBytesMax = std::int64_t{4} << 30;
inline constexpr std::uint32_t kStagingBuffersDefault = 2;  // per sender
inline constexpr std::int64_t kDeadlineMsDefault = 60'000;  // without progress
inline constexpr std::int64_t kPingIntervalMs = 250;

}  // namespace headrace::limits
