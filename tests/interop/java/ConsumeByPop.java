import java.util.HashSet;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * ConsumeByPop NAMESERVERS GROUP TOPIC DIGITS BROKER: makes topic and group, sets their mode to POP, and is a push
 * consumer that pops until stdin ends. It fails the first try of every key that ends in DIGITS. A line per message
 * that it consumed, one per failure.
 */
public final class ConsumeByPop {
    public static void main(String[] args) throws Exception {
        setMode(args[0], args[1], args[2], args[4]);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[1]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setPollNameServerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setClientRebalance(false);
        consumer.setPopInvisibleTime(10_000);
        consumer.subscribe(args[2], "*");
        Set<String> failed = new HashSet<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                String key = message.getKeys();
                boolean fails;
                synchronized (failed) {
                    fails = key.endsWith(args[3]) && failed.add(key);
                }
                if (fails) {
                    context.setDelayLevelWhenNextConsume(1);
                    Lines.print("failed", key);
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                Lines.print("key", key, "reconsumeTimes", message.getReconsumeTimes(),
                    "pop", message.getProperty("1ST_POP_TIME") != null, "topic", message.getTopic());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Lines.print("started", true);
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
        consumer.shutdown();
        Lines.print("done", true);
        System.exit(0);
    }

    static void setMode(String servers, String group, String topic, String broker) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(servers);
        admin.start();
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(topic, 4, 4));
        SubscriptionGroupConfig config = new SubscriptionGroupConfig();
        config.setGroupName(group);
        admin.createAndUpdateSubscriptionGroupConfig(broker, config);
        admin.setMessageRequestMode(broker, topic, group, MessageRequestMode.POP, 0, 5000);
        admin.shutdown();
    }
}
