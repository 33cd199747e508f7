#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

// H2O (arXiv 2306.14048, Algorithm 1) for one (row, KV head) in plain float64 loops, written to be
// read. The tests compare the kernels with it; it shares no code with them and knows no torch.
namespace reference {

using Row = std::vector<double>;  // head_dim elements, or one weight per key

struct Rules {
  int64_t num_sink = 0, num_heavy = 0, num_recent = 0;
  bool reduce_max = false;  // the group's weights become a score by max instead of sum
  double scale = 1.0;
  Row alibi_slopes = {};  // one per query head of the group, or none

  int64_t budget() const { return num_sink + num_heavy + num_recent; }
};

// What a slot holds; position -1 = nothing.
struct Token {
  int64_t position = -1;
  double score = 0.0;
  Row key = {}, value = {};
};

struct NewToken {
  int64_t position = -1;
  Row key = {}, value = {};
  std::vector<Row> queries = {};  // one per query head of the group
};

// Whether `a` leaves before `b`: NaN first, then the lower score, then the older token.
inline bool leaves_first(const Token& a, const Token& b) {
  if (std::isnan(a.score) && !std::isnan(b.score)) return true;
  if (std::isnan(b.score) && !std::isnan(a.score)) return false;
  if (a.score < b.score) return true;
  if (a.score > b.score) return false;
  return a.position < b.position;
}

// Softmax weights of one query over `keys`; adds the weighted values to `output`.
inline Row attend(const Row& query, int64_t query_position, const std::vector<const Token*>& keys,
                  double scale, double slope, Row& output) {
  Row weights;
  for (const Token* key : keys) {
    double logit = 0.0;
    for (size_t d = 0; d < query.size(); ++d) logit += query[d] * key->key[d];
    weights.push_back(logit * scale + slope * static_cast<double>(key->position - query_position));
  }
  const double maximum = *std::max_element(weights.begin(), weights.end());
  double total = 0.0;
  for (double& weight : weights) total += weight = std::exp(weight - maximum);
  for (size_t k = 0; k < keys.size(); ++k) {
    weights[k] /= total;
    for (size_t d = 0; d < output.size(); ++d) output[d] += weights[k] * keys[k]->value[d];
  }
  return weights;
}

struct StepResult {
  std::vector<std::vector<Row>> output;  // [token][query head]
  std::vector<int64_t> evicted;          // positions, in the order they left
};

class Head {
 public:
  explicit Head(std::vector<Token> slots) : slots_(std::move(slots)) {}

  const std::vector<Token>& slots() const { return slots_; }
  // The smallest distance, over all evictions so far, between the score that left and the next that
  // could have: arithmetic less exact than this one may choose another victim only where it is
  // small.
  double margin() const { return margin_; }

  // Tokens that join together: attend causally, score, then evict (at most as many as came).
  StepResult step(const std::vector<NewToken>& chunk, const Rules& rules) {
    StepResult result;
    std::vector<Token> fresh;
    for (const NewToken& token : chunk)
      fresh.push_back({token.position, 0.0, token.key, token.value});
    for (size_t i = 0; i < chunk.size(); ++i) {
      std::vector<Token*> visible;
      for (Token& slot : slots_) {
        if (slot.position >= 0) visible.push_back(&slot);
      }
      for (size_t j = 0; j <= i; ++j) visible.push_back(&fresh[j]);
      const std::vector<const Token*> keys(visible.begin(), visible.end());
      Row mass(keys.size(), 0.0);
      std::vector<Row>& output = result.output.emplace_back();
      for (size_t h = 0; h < chunk[i].queries.size(); ++h) {
        output.emplace_back(chunk[i].value.size(), 0.0);
        const double slope = rules.alibi_slopes.empty() ? 0.0 : rules.alibi_slopes[h];
        const Row weights =
            attend(chunk[i].queries[h], chunk[i].position, keys, rules.scale, slope, output.back());
        for (size_t k = 0; k < keys.size(); ++k) {
          mass[k] = rules.reduce_max ? std::max(mass[k], weights[k]) : mass[k] + weights[k];
        }
      }
      for (size_t k = 0; k < keys.size(); ++k) visible[k]->score += mass[k];
    }
    result.evicted =
        settle(fresh, chunk.back().position, rules, static_cast<int64_t>(chunk.size()), true);
    return result;
  }

  // Tokens that have a score already (there may be none): evict until the budget holds.
  std::vector<int64_t> evict(const std::vector<Token>& fresh, const Rules& rules) {
    int64_t newest = -1;
    for (const Token& token : slots_) newest = std::max(newest, token.position);
    for (const Token& token : fresh) newest = std::max(newest, token.position);
    return settle(fresh, newest, rules, std::numeric_limits<int64_t>::max(), false);
  }

 private:
  // Steps 4 to 6. Where nobody may leave, the newest of the new tokens does: always with `force`,
  // else only for want of a slot.
  std::vector<int64_t> settle(std::vector<Token> fresh, int64_t newest, const Rules& rules,
                              int64_t most, bool force) {
    const auto occupied = [](const std::vector<Token>& tokens) {
      return std::count_if(tokens.begin(), tokens.end(),
                           [](const Token& token) { return token.position >= 0; });
    };
    const std::vector<Token> before = slots_;
    std::vector<int64_t> left;
    while (occupied(slots_) + occupied(fresh) > rules.budget() &&
           static_cast<int64_t>(left.size()) < most) {
      std::vector<Token*> may_leave;
      for (std::vector<Token>* tokens : {&slots_, &fresh}) {
        for (Token& token : *tokens) {
          const bool sink = token.position < rules.num_sink;
          const bool recent = token.position > newest - rules.num_recent;
          if (token.position >= 0 && !sink && !recent) may_leave.push_back(&token);
        }
      }
      std::sort(may_leave.begin(), may_leave.end(),
                [](const Token* a, const Token* b) { return leaves_first(*a, *b); });
      Token* victim = nullptr;
      if (!may_leave.empty()) {
        victim = may_leave[0];
        if (may_leave.size() > 1)
          margin_ = std::min(margin_, may_leave[1]->score - may_leave[0]->score);
      } else if (force ||
                 occupied(slots_) + occupied(fresh) > static_cast<int64_t>(slots_.size())) {
        for (Token& token : fresh) {
          if (token.position >= 0) victim = &token;
        }
      }
      if (victim == nullptr) break;
      left.push_back(victim->position);
      *victim = Token{-1, 0.0, victim->key, victim->value};  // the bytes stay
    }
    // The slots that were just freed are taken first, then those that were empty, each from the
    // lowest up.
    std::vector<size_t> places;
    for (const bool freed : {true, false}) {
      for (size_t slot = 0; slot < slots_.size(); ++slot) {
        if (slots_[slot].position < 0 && (before[slot].position >= 0) == freed)
          places.push_back(slot);
      }
    }
    size_t next = 0;
    for (Token& token : fresh) {
      if (token.position >= 0) slots_[places[next++]] = token;
    }
    return left;
  }

  std::vector<Token> slots_;
  double margin_ = std::numeric_limits<double>::infinity();
};

// Which tokens of a prompt stay, as indices into it, ascending, and the score of each. `margin`: by
// how much the lowest score that was kept for itself exceeds the highest that was not.
struct Selection {
  std::vector<int64_t> kept = {};
  Row scores = {};
  double margin = std::numeric_limits<double>::infinity();
};
inline Selection select(const std::vector<NewToken>& prompt, const Rules& rules) {
  Selection selection;
  if (prompt.empty()) return selection;
  Head head{std::vector<Token>(prompt.size())};
  Rules keep_all = rules;
  keep_all.num_heavy = static_cast<int64_t>(prompt.size());
  head.step(prompt, keep_all);
  const std::vector<Token> scored = head.slots();
  head.evict({}, rules);
  double highest_left = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < scored.size(); ++i) {
    if (head.slots()[i].position < 0) highest_left = std::max(highest_left, scored[i].score);
  }
  for (size_t i = 0; i < scored.size(); ++i) {
    if (head.slots()[i].position < 0) continue;
    selection.kept.push_back(static_cast<int64_t>(i));
    selection.scores.push_back(scored[i].score);
    const bool is_sink = scored[i].position < rules.num_sink;
    const bool is_recent = scored[i].position > prompt.back().position - rules.num_recent;
    if (!is_sink && !is_recent)
      selection.margin = std::min(selection.margin, scored[i].score - highest_left);
  }
  return selection;
}

}  // namespace reference
